"""What `relaygr_stream` exports: the names that users' code says, and that releases keep."""

from __future__ import annotations

import subprocess
import sys

import pytest

import relaygr_stream
from relaygr_stream import errors

ERRORS = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.RelayError)
}
CLIENT = {
    "Behaviours",
    "Ranking",
    "RankingRequest",
    "RelayClient",
    "Request",
    "RequestEvent",
    "SyncRelayClient",
    "pack_items",
}
FEATURES = {"FeatureColumn", "FeatureSchema"}
MODEL = {"DecoderModel", "KVLayout", "KVRegion", "RankingModel", "ScoreInput", "SteppedModel", "Tokens", "WarmedModel"}
HISTORY = {"HistoryReference", "HistoryStore", "open_store"}
SETTINGS = {"Settings", "load_settings"}


def test_the_list_is_this_one() -> None:
    assert set(relaygr_stream.__all__) == ERRORS | CLIENT | FEATURES | HISTORY | MODEL | SETTINGS
    assert dir(relaygr_stream) == sorted(relaygr_stream.__all__)


def test_each_is_there() -> None:
    for name in relaygr_stream.__all__:
        assert getattr(relaygr_stream, name).__name__ == name


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = relaygr_stream.Nonsense


def test_a_deadline_is_a_timeout() -> None:
    error = relaygr_stream.DeadlineExceeded("no answer within 200 ms")
    assert isinstance(error, TimeoutError)
    assert isinstance(error, relaygr_stream.RequestError)
    assert str(error) == "no answer within 200 ms"


def loaded(*steps: str) -> list[list[str]]:
    """What is loaded after each of these."""
    say = "import sys; print(*(each for each in ('aiokafka', 'torch', 'numpy') if each in sys.modules))"
    code = "\n".join(line for step in steps for line in (step, say))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def test_an_error_loads_nothing_and_a_client_no_torch() -> None:
    error, client = loaded(
        "from relaygr_stream import DeadlineExceeded",
        "from relaygr_stream import RelayClient; import relaygr_stream.trigger.service",
    )
    assert not error
    assert "aiokafka" in client and "torch" not in client


@pytest.mark.stack  # torch imported anew
def test_a_model_author_pays_for_no_kafka_client() -> None:
    assert "aiokafka" not in loaded("from relaygr_stream import KVRegion, RankingModel")[0]
