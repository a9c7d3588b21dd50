"""A tiny model that waits, and one that takes its process along."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from relaygr_stream.bus import crashes
from relaygr_stream.models.api import RankingModel, ScoreInput
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings.schema import Relay
from relaygr_stream.settings.worker import Model

#: Settings of a worker that has it.
SETTINGS: Final = (f"model.path={Path(__file__).parents[2]}", "model.factory=tests.e2e.gated:gated")
#: While the file that this variable of the environment names exists, scoring waits.
GATE = "TESTS_GATE"
#: A candidate, or an item of a history, that kills the process which scores or prefills it.
POISON = 666


class Gated:
    """The built-in model, and what the variables above say."""

    def __init__(self, model: RankingModel) -> None:
        self.model = model
        self._gate = Path(os.environ[GATE]) if os.environ.get(GATE) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Wait at the gate, die of poison, or score."""
        self._wait()
        if any((one.candidates == POISON).any() for one in batch):
            os._exit(9)
        return self.model.score(batch)

    def prefill(self, kv: Any, tokens: Any) -> None:
        """As the model does; behind a gate nothing is computed, so that long prefixes cost a test nothing."""
        if (tokens.array[0] == POISON).any():
            os._exit(9)
        if self._gate is None:
            self.model.prefill(kv, tokens)
        else:
            self._wait()
            kv.length += len(tokens)

    def _wait(self) -> None:
        while self._gate is not None and self._gate.exists():
            time.sleep(0.01)


def gated(model: Model, device: torch.device, dtype: torch.dtype) -> RankingModel:
    """The model of the settings behind the gate, in a process that takes its time to count its predecessors' ends."""
    crashes.NOTE_S = 20.0  # type: ignore[misc]  # Final; beside others, Kafka may need more than its second
    built_in = Model(checkpoint=model.checkpoint)
    made: Any = Gated(load_model(built_in, Relay(), device=device, dtype=dtype))
    return made  # type: ignore[no-any-return]
