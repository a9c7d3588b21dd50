"""The demo's requests: generated ones, or the latest of a user's log, in item ids that the checkpoint knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from relaygr_lab.processes import known_items
from relaygr_stream.history.store import WritableStore
from relaygr_stream.models.loading import checkpoint_folder, read_config
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.wire.behaviours import WIDE_VERSION, Behaviours
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import with_version
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.packaged import ITEM_EXPONENT
from relaygr_stream.workload.replay import Replay, ReplayOptions
from relaygr_stream.workload.rows import read_log_for

#: Median prefix: its full inference takes tens of milliseconds on one core, its ranking with prefix KV a few.
MEDIAN_TOKENS: Final = 700.0
#: Candidates of a request, and behaviours that are sent at ranking only; less where the settings allow less.
CANDIDATES: Final = 100
SUFFIX: Final = 8
#: Seconds of requests before the measured ones, for first connections, fetches and allocations. A broker in Java needs
#: most of this time to compile its code.
WARM_UP_S: Final = 5.0
#: Behaviours of the last mode, and its rate at least: one takes a worker a few milliseconds.
NEWEST: Final = 50
NEWEST_RATE: Final = 30.0


#: Turns that the modes take: a disturbance of some seconds meets all of them.
TURNS: Final = 4


class Requests(NamedTuple):
    """The requests of each mode, in the order of time."""

    warm_up: list[WorkItem]
    relayed: list[WorkItem]  # measured with the relay
    measured: list[WorkItem]  # the same in full
    newest: list[WorkItem]  # the same with the newest behaviours only, evenly spaced

    def turns(self) -> Iterator[tuple[list[WorkItem], list[WorkItem], list[WorkItem]]]:
        """The relayed, measured and newest ones in TURNS parts, each with times from its own start."""
        size = -(-len(self.measured) // TURNS)
        for start in range(0, len(self.measured), size):
            relayed, measured, newest = (
                [replace(item, at=item.at - mode[start].at) for item in mode[start : start + size]]
                for mode in (self.relayed, self.measured, self.newest)
            )
            yield relayed, measured, newest


def requests_of(settings: Settings, events: Path | None, *, seconds: float, rate: float, seed: int) -> Requests:
    """All requests; events: a user's log, None for generated ones.

    Raises InputError for a log, or ModelError for a checkpoint, that cannot be used.
    """
    warm_up = generated(settings, WARM_UP_S, rate, seed=seed + 1, run="warm-")
    if events is None:
        measured = generated(settings, seconds, rate, seed=seed, run="demo-")
    else:
        measured = replayed(events, settings, seconds, rate, seed=seed, run="demo-")
    pace = max(NEWEST_RATE, rate)
    newest = [
        replace(newest_only(item, NEWEST), at=index / pace, stage_delay=0.0) for index, item in enumerate(measured)
    ]
    return Requests(warm_up, measured, measured, newest)


async def by_reference(items: Iterable[WorkItem], store: WritableStore) -> list[WorkItem]:
    """The same requests, which refer to histories that the store has afterwards; items: in the order of time.

    A request whose history does not begin with the user's last one carries it: the store has one history of a user.
    """
    referring: list[WorkItem] = []
    known: dict[str, Behaviours] = {}
    references: dict[str, HistoryReference] = {}
    for item in items:
        user, prefix = item.event.user_id, item.event.prefix
        before = known.get(user)
        stored = 0 if before is None else len(before)
        if not len(prefix) or (before is not None and prefix.slice(0, stored) != before):
            referring.append(item)
            continue
        if len(prefix) > stored:
            references[user] = await store.append(user, "", prefix.slice(stored, len(prefix)))
            known[user] = prefix
        event, request = item.event, item.request
        event = msgspec.structs.replace(event, prefix=Behaviours(), **with_version(references[user]))
        stated = with_version(references[user], request.suffix, wide=request.v >= WIDE_VERSION)
        request = msgspec.structs.replace(request, prefix=Behaviours(), **stated)
        referring.append(replace(item, event=event, request=request))
    return referring


def features_of(model: Model) -> FeatureSchema:
    """The features that a checkpoint reads. Raises ModelError as `known_items` does."""
    if model.factory or not model.checkpoint:
        return NO_FEATURES
    return FeatureSchema(read_config(checkpoint_folder(model.checkpoint)).features)


def traffic_options(settings: Settings, *, items: int, rate: float, seed: int, run: str) -> GeneratorOptions:
    """The demo's generated workload: the checkpoint was trained on users of these options."""
    return GeneratorOptions(
        seed=seed,
        rate=rate,
        items=items,
        item_exponent=ITEM_EXPONENT,
        length=min(MEDIAN_TOKENS, settings.relay.max_prefix_tokens / 2),
        sigma=0.5,
        revisit=0.4,
        return_s=8.0,  # long enough that HBM spills some of them meanwhile (workers/demo.toml)
        suffix=min(SUFFIX, settings.relay.max_suffix_tokens),
        candidates=min(CANDIDATES, settings.relay.max_candidates, items // 2),
        max_prefix=settings.relay.max_prefix_tokens,
        features=features_of(settings.model),
        run=run,
    )


def generated(settings: Settings, seconds: float, rate: float, *, seed: int, run: str) -> list[WorkItem]:
    """The generated requests of so many seconds; at least one, at once."""
    options = traffic_options(settings, items=known_items(settings.model), rate=rate, seed=seed, run=run)
    found = list(takewhile(lambda item: item.at < seconds, Generator(options)))
    return found or [replace(next(iter(Generator(options))), at=0.0)]


def replayed(file: Path, settings: Settings, seconds: float, rate: float, *, seed: int, run: str) -> list[WorkItem]:
    """The latest requests of a log: as many as the rate asks for.

    Raises InputError for a log that cannot be read or has items that the model does not know.
    """
    options = ReplayOptions(
        seed=seed,
        requests=max(1, round(seconds * rate)),
        rate=rate,
        suffix=min(SUFFIX, settings.relay.max_suffix_tokens),
        candidates=min(CANDIDATES, settings.relay.max_candidates),
        max_prefix=settings.relay.max_prefix_tokens,
        run=run,
    )
    return list(Replay(read_log_for(file, settings.model, features=features_of(settings.model)), options))


def newest_only(item: WorkItem, behaviours: int) -> WorkItem:
    """The same ranking with only the newest behaviours of prefix and suffix known."""
    request = item.request
    kept = max(1, behaviours - len(request.suffix))
    prefix = request.prefix.slice(max(0, len(request.prefix) - kept), len(request.prefix))
    return replace(item, request=msgspec.structs.replace(request, prefix=prefix))
