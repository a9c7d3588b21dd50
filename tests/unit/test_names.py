"""Names of `relaygr up`'s workers on one host."""

from __future__ import annotations

import socket

import pytest

from relaygr_stream.errors import ConfigError
from relaygr_stream.ops.names import reserved_name
from relaygr_stream.settings.schema import Kafka, Settings


def relay(prefix: str) -> Settings:
    return Settings(kafka=Kafka(prefix=prefix))


def test_each_of_several_has_a_name_of_its_own_until_it_ends() -> None:
    host, ours = socket.gethostname(), relay("names.")
    with reserved_name(None, ours) as first:
        assert first.startswith(host)  # another fleet of this machine may have the plain one
        with reserved_name(None, relay("names-2.")) as second:
            assert second.startswith(f"{host}.")
        with reserved_name(None, ours) as again:
            assert again == second
        with pytest.raises(ConfigError, match=f"--name {first}: another `relaygr up`"), reserved_name(first, ours):
            pass


def test_a_given_name_is_taken_in_its_relay_alone() -> None:
    with (
        reserved_name("w", relay("names.")),
        reserved_name("w", relay("names-2.")),
        pytest.raises(ConfigError, match="give another --name"),
        reserved_name("w", relay("names.")),
    ):
        pass
    with reserved_name("w", relay("names.")) as name:
        assert name == "w"
