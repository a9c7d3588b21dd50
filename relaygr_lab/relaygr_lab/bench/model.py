"""The model of `relaygr bench slo`: an HSTU with random weights, unless the settings name another."""

from __future__ import annotations

from typing import Final

import msgspec

from relaygr_stream.settings.load import Config
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model

#: 4 KiB of K and V a token in float32; a full inference of 1,024 tokens takes about half of the SLO on two cores.
BENCH_MODEL: Final = Model(layers=2, dim=256, heads=4, dqk=64, dv=64, vocab=20_000)


def with_bench_model(config: Config) -> Settings:
    """The settings, with the bench's model where nobody set anything in [model]."""
    if any(value.source != "default" for value in config.values if value.field.key.startswith("model.")):
        return config.settings
    return msgspec.structs.replace(config.settings, model=BENCH_MODEL)
