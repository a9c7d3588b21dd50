"""RelayGR Stream: relay-race inference for generative recommendation over Kafka.

Every name that a user needs is here: the client, what its messages are made of, settings, errors, and what a model is
made of. All but the errors are imported on first use, so a model's author does not import a Kafka client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from relaygr_stream.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnavailable,
    CacheCorruption,
    CapacityError,
    ConfigError,
    CoPartitionError,
    DeadlineExceeded,
    DecodeError,
    DeviceError,
    FactoryError,
    HistoryError,
    HistoryMismatch,
    HistoryUnavailable,
    InputError,
    LanesChanged,
    MessageTooLarge,
    ModelError,
    Overloaded,
    PartitionsAway,
    Rejected,
    RelayError,
    RequestError,
    Superseded,
    TopicError,
    UnknownScenario,
    WorkerFailed,
)

if TYPE_CHECKING:
    from relaygr_stream.client import Ranking, RelayClient, Request, SyncRelayClient
    from relaygr_stream.history.store import HistoryStore, open_store
    from relaygr_stream.models.api import RankingModel, ScoreInput, SteppedModel, Tokens, WarmedModel
    from relaygr_stream.models.decoder import DecoderModel
    from relaygr_stream.models.kv import KVLayout, KVRegion
    from relaygr_stream.settings import Settings
    from relaygr_stream.settings.load import load_settings
    from relaygr_stream.wire.behaviours import Behaviours, pack_items
    from relaygr_stream.wire.features import FeatureColumn, FeatureSchema
    from relaygr_stream.wire.history import HistoryReference
    from relaygr_stream.wire.messages import RankingRequest, RequestEvent

__all__ = [
    "AccessDenied",
    "Behaviours",
    "BrokerError",
    "BrokerUnavailable",
    "CacheCorruption",
    "CapacityError",
    "CoPartitionError",
    "ConfigError",
    "DeadlineExceeded",
    "DecodeError",
    "DecoderModel",
    "DeviceError",
    "FactoryError",
    "FeatureColumn",
    "FeatureSchema",
    "HistoryError",
    "HistoryMismatch",
    "HistoryReference",
    "HistoryStore",
    "HistoryUnavailable",
    "InputError",
    "KVLayout",
    "KVRegion",
    "LanesChanged",
    "MessageTooLarge",
    "ModelError",
    "Overloaded",
    "PartitionsAway",
    "Ranking",
    "RankingModel",
    "RankingRequest",
    "Rejected",
    "RelayClient",
    "RelayError",
    "Request",
    "RequestError",
    "RequestEvent",
    "ScoreInput",
    "Settings",
    "SteppedModel",
    "Superseded",
    "SyncRelayClient",
    "Tokens",
    "TopicError",
    "UnknownScenario",
    "WarmedModel",
    "WorkerFailed",
    "load_settings",
    "open_store",
    "pack_items",
]

_LAZY: Final = {
    "Ranking": "relaygr_stream.client",
    "RelayClient": "relaygr_stream.client",
    "SyncRelayClient": "relaygr_stream.client",
    "Request": "relaygr_stream.client",
    "DecoderModel": "relaygr_stream.models.decoder",
    "KVLayout": "relaygr_stream.models.api",
    "KVRegion": "relaygr_stream.models.api",
    "RankingModel": "relaygr_stream.models.api",
    "ScoreInput": "relaygr_stream.models.api",
    "SteppedModel": "relaygr_stream.models.api",
    "Tokens": "relaygr_stream.models.api",
    "WarmedModel": "relaygr_stream.models.api",
    "Settings": "relaygr_stream.settings",
    "load_settings": "relaygr_stream.settings.load",
    "HistoryReference": "relaygr_stream.wire.history",
    "HistoryStore": "relaygr_stream.history.store",
    "open_store": "relaygr_stream.history.store",
    "FeatureColumn": "relaygr_stream.wire.features",
    "FeatureSchema": "relaygr_stream.wire.features",
    "Behaviours": "relaygr_stream.wire.behaviours",
    "RankingRequest": "relaygr_stream.wire.messages",
    "RequestEvent": "relaygr_stream.wire.messages",
    "pack_items": "relaygr_stream.wire.behaviours",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
