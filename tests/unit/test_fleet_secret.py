"""Keys of a fleet: the same everywhere, one for each purpose, and slow to guess."""

from __future__ import annotations

import pytest

from relaygr_stream.wire import signature as fleet_secret
from relaygr_stream.wire.signature import purpose_key


def test_a_key_depends_on_secret_and_purpose_alone() -> None:
    first = purpose_key("sixteen or more characters", "a 1")
    assert purpose_key("sixteen or more characters", "b 1") != first
    assert purpose_key("sixteen or more Characters", "a 1") != first
    assert len(first) == fleet_secret.KEY_BYTES


def test_processes_of_other_releases_derive_the_same() -> None:
    """Known answer: a change of it cuts a fleet in two while it is upgraded."""
    assert (
        purpose_key("sixteen or more characters", "test 1").hex()
        == "de76cd904b5c638db752ec1c5eadc83ac562513e82f1d744d5d5bf2b809a049e"
    )


def test_a_guess_costs_memory_and_time() -> None:
    """What OWASP asks for: at least 2^17 blocks of 128 × r bytes in all."""
    cost = fleet_secret.SCRYPT
    assert cost["n"] * cost["p"] * cost["r"] >= 3 * 2**15 * 8
    assert cost["n"] * cost["r"] * 128 == 32 << 20


def test_an_empty_secret_gives_no_key() -> None:
    with pytest.raises(ValueError, match="empty"):
        purpose_key("", "a 1")
