"""Generated requests for training and validation: each by a user of its own, shaped as the demo's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from relaygr_lab.demo.traffic import newest_only, traffic_options

from examples.movielens.data import Histories, History
from relaygr_stream.models.api import KVRegion, RankingModel, ScoreInput, Tokens
from relaygr_stream.settings.schema import Settings
from relaygr_stream.workload.generator import Generator
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.metrics import QualityMeter

#: So many users that no two requests are by the same one.
STRANGERS = 1 << 20


def fresh_requests(settings: Settings, items: int, count: int, seed: int) -> list[WorkItem]:
    """The first requests of `count` users."""
    options = traffic_options(settings, items=items, rate=1.0, seed=seed, run="fresh-")
    return list(islice(Generator(replace(options, users=STRANGERS, zipf=0.0, revisit=0.0)), count))


def histories(requests: Iterable[WorkItem], items: int) -> Histories:
    """Prefix and suffix of each request as a user's history."""
    users = []
    for item in requests:
        older, newer = item.request.prefix.arrays(), item.request.suffix.arrays()
        ids, actions, times = (np.append(older[part], newer[part]).astype(np.int64) for part in range(3))
        users.append(History(item.event.user_id, ids, actions, times))
    return Histories(users, [str(item) for item in range(items)], has_times=True)


def offline_quality(model: RankingModel, requests: Iterable[WorkItem], newest: int | None = None) -> QualityMeter:
    """HR@10 and NDCG@10 of full inference in this process; newest: only so many behaviours are known."""
    meter = QualityMeter()
    with torch.no_grad():
        for item in requests:
            request = (item if newest is None else newest_only(item, newest)).request
            region = KVRegion.new(model.layout, len(request.prefix))
            model.prefill(region, Tokens.from_behaviours(request.prefix))
            # As a worker does it: the first gap of the suffix is the time since the prefix.
            last_ms = int(request.prefix.arrays()[2][-1])
            suffix = Tokens.from_behaviours(request.suffix, last_ms)
            candidates = np.frombuffer(request.candidates, "<u4").astype(np.int64)
            scores = model.score([ScoreInput(region, suffix, candidates)])[0]
            assert item.target is not None  # a generated request has one
            meter.add(scores[:, 0].numpy(), item.target, item.popularity)
    return meter
