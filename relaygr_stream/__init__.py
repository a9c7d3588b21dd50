"""RelayGR Stream: relay-race inference for generative recommendation over Kafka."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from relaygr_stream.client import Ranking, RelayClient
    from relaygr_stream.messages import Behaviours, RankingRequest, RequestEvent

__all__ = ["Behaviours", "Ranking", "RankingRequest", "RelayClient", "RequestEvent"]

# Imported when asked for: whoever needs one module (a model author, say) pays for no Kafka client.
_HOME: Final = {
    "Behaviours": "relaygr_stream.messages",
    "Ranking": "relaygr_stream.client",
    "RankingRequest": "relaygr_stream.messages",
    "RelayClient": "relaygr_stream.client",
    "RequestEvent": "relaygr_stream.messages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
