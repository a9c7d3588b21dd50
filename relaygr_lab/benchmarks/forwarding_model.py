"""A model of stated cost: its operations sleep on the device thread, so that a worker's capacity takes no processor.

The scores are a sum over the sequence, so that an answer shows whether the whole of it was seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.kv import KVLayout, KVRegion

#: All its times are so many times as long (set before it is imported): the machine's own are less beside them.
DILATION = float(os.environ.get("SLEEPER_DILATION", "1"))
#: Milliseconds of the device. Slow, so that what the processor does for a request is little beside it.
TOKEN_MS, RANKING_MS = 0.5 * DILATION, 2.5 * DILATION
#: Sums of this many item ids below this are exact in float32.
ITEMS = 1000


class Sleeper:
    """One layer, one head, one number a token: the item id."""

    layout = KVLayout(layers=1, heads=1, dqk=1, dv=1, dtype=torch.float32)
    version = "sleeper-1"
    note = "sleeps instead of computing"
    tasks = ("sum",)
    incremental = True

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Remember the item ids, and sleep."""
        keys, _ = kv.layer(0)
        end = kv.length + len(tokens)
        keys[0, kv.length : end, 0] = torch.as_tensor(tokens.array[0] % ITEMS, dtype=torch.float32)
        time.sleep(len(tokens) * TOKEN_MS / 1e3)
        kv.length = end

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """The sum of all item ids, plus the candidate's own."""
        time.sleep(len(batch) * RANKING_MS / 1e3)
        return [
            (torch.as_tensor(one.candidates, dtype=torch.float32) + one.kv.layer(0)[0][0, : one.kv.length, 0].sum())[
                :, None
            ]
            for one in batch
        ]


def sleeper(*_: Any) -> Sleeper:
    """model.factory = "forwarding_model:sleeper"."""
    return Sleeper()
