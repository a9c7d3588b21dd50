"""Full inference in the test's own process, by the model that the workers have: what their scores must equal.

Knows nothing of caches, batches, chunks or the bus.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.api import ScoreInput, Tokens, relative_deviation
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.behaviours import ITEM_DTYPE
from relaygr_stream.wire.messages import RankingRequest


class Truth:
    """One model on the CPU, in float32. Call it from one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._model = load_model(
            settings.model, settings.relay, device=torch.device("cpu"), dtype=torch.float32, kernels="torch"
        )
        self._scratch = KVRegion.new(self._model.layout, settings.relay.max_prefix_tokens)

    @property
    def version(self) -> str:
        """The model's version, as answers state it."""
        return self._model.version

    def scores(self, request: RankingRequest) -> npt.NDArray[np.float32]:
        """(candidates, tasks) by full inference."""
        times = request.prefix.times
        last = int.from_bytes(times[-8:], "little", signed=True) if times else None
        candidates = np.frombuffer(request.candidates, ITEM_DTYPE).astype(np.int64)
        self._scratch.length = 0
        with torch.inference_mode():
            self._model.prefill(self._scratch, Tokens.from_behaviours(request.prefix))
            suffix = Tokens.from_behaviours(request.suffix, previous_ms=last)
            (scores,) = self._model.score([ScoreInput(self._scratch, suffix, candidates)])
        return scores.numpy()

    def deviation(self, request: RankingRequest, scores: npt.NDArray[np.float32]) -> float:
        """How far these scores are from full inference, relative; infinite where the shapes differ."""
        return relative_deviation(scores, self.scores(request))
