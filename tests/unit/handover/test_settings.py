"""What the settings refuse, and what they never show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relaygr_stream.errors import ConfigError
from relaygr_stream.handover.build import handover_for, identity_of
from relaygr_stream.settings import load as config
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Handover, Worker
from relaygr_stream.telemetry.tracing import OFF
from relaygr_stream.worker.context import WorkerContext
from relaygr_stream.worker.device import Device
from tests.unit.models.small_models import small_model

SECRET = "sixteen or more characters"


def test_the_secret_is_not_shown() -> None:
    assert SECRET not in repr(Settings(handover=Handover(secret=SECRET)))


def test_a_command_line_is_no_place_for_it() -> None:
    with pytest.raises(ConfigError, match=r"handover\.secret") as refused:
        config.load_settings([], {"handover.secret": SECRET})
    assert SECRET not in str(refused.value)


def test_a_short_one_is_refused_and_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYGR_HANDOVER_SECRET", "guess me")
    with pytest.raises(ConfigError, match="16 characters") as refused:
        config.load_settings([], {})
    assert "guess me" not in str(refused.value)


def test_without_a_dram_tier_there_is_nothing_to_hand_over_from() -> None:
    unused: Any = None
    unused_device = Device(unused, unused)
    settings = Settings(handover=Handover(secret=SECRET), worker=Worker(dram_bytes=0))
    with pytest.raises(ConfigError, match=r"worker\.dram_bytes"):
        handover_for(WorkerContext(settings, "w", unused, unused, OFF, unused), unused_device, unused, unused)


def test_workers_whose_kernels_differ_do_not_exchange_prefix_kv() -> None:
    runtime: Any = SimpleNamespace(model=small_model(), device=torch.device("cpu"))
    ours = identity_of(runtime, 8)
    runtime.model.stack.native = SimpleNamespace(name="amx")
    assert ours.difference(identity_of(runtime, 8)).endswith("there")
    assert identity_of(runtime, 8).device == "cpu/amx"
