"""Which group of workers serves which users: the records of `routes`, a compacted topic that `relaygr rollout` and
`relaygr up --fleet` make.

A group is a relay of its own: its topics and consumer groups begin with `kafka.prefix`, the group's name and a dot;
those of the group "" with `kafka.prefix` alone. So nothing of one group reaches another one: no signal, no forward, no
prefix KV. Clients choose the group of a request, by the newest routes that they know. Without a record all users are in
the group "". A scenario has a record of its own, under its name: only groups that are named there serve its requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Final, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.scenarios import MAX_SCENARIOS, NAME
from relaygr_stream.settings.schema import MAX_LANES, Settings
from relaygr_stream.wire.messages import Finite, Label, LeastVersion, UnixMillis
from relaygr_stream.wire.records import HEADER_KIND, Record, kind_of
from relaygr_stream.wire.topic_files import Topic, TopicSet, murmur2
from relaygr_stream.wire.versions import SCHEMA_VERSION, VersionedDecoder
from relaygr_stream.wire.worker_status import StatusReader

#: The name of the topic behind kafka.prefix, and the key of its record.
TOPIC: Final = "routes"
KEY: Final = b"default"
#: HEADER_KIND of a scenario's record, whose key is its name: readers that know no scenarios skip it.
KIND: Final = "scenario"
#: Positions of users, and the unit of shares.
POSITIONS: Final = 10_000
#: An epoch is Unix time in milliseconds, or one more than the last.
MAX_AHEAD_MS: Final = 86_400_000
#: The group that all users are in without a record.
OWN: Final = ""

GroupName = Annotated[str, Meta(pattern=r"\A([a-z0-9][a-z0-9-]{0,23})?\Z")]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Share = Annotated[int, Meta(ge=0, le=POSITIONS)]


class RoutePart(msgspec.Struct, frozen=True, kw_only=True):
    """One group: its part of the users, and the number of its lanes."""

    group: GroupName
    share: Share  # in 10,000ths
    lanes: Annotated[int, Meta(ge=1, le=MAX_LANES)]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one group answered during a step, for people."""

    version: Annotated[str, Meta(max_length=300)] = ""  # of its model
    answers: Count = 0
    errors: Count = 0  # answers without scores
    late: Count = 0  # answers without scores within relay.slo_ms
    hits: Finite = 0.0  # share of its scored rankings that found prefix KV
    p99_ms: Finite = 0.0


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout that wrote the routes last: for people, but for `Routes.on_trial`."""

    state: Label  # "moving", "done", "back"; later releases may add more
    group: GroupName  # where users move to
    steps: Annotated[tuple[Share, ...], Meta(max_length=100)]
    step: Count = 0  # index of the present one
    reason: Annotated[str, Meta(max_length=500)] = ""  # why it stays or went back
    figures: Annotated[dict[GroupName, Figures], Meta(max_length=16)] = {}


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """On `routes`: which part of the users each group serves, in order of their positions. The highest epoch counts."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    epoch: Count
    sent_ms: UnixMillis
    parts: Annotated[tuple[RoutePart, ...], Meta(min_length=1, max_length=16)]
    rollout: RolloutProgress | UnsetType = UNSET

    def validate(self) -> None:
        """Raise DecodeError where the parts are not all users, each in one group."""
        if sum(part.share for part in self.parts) != POSITIONS:
            raise DecodeError("invalid", f"the shares of the groups must be {POSITIONS} together")
        if len({part.group for part in self.parts}) != len(self.parts):
            raise DecodeError("invalid", "a group stands twice in the routes")

    def group_of(self, user_id: str) -> str:
        """The group that serves the user."""
        return self.group_at(position(user_id))

    def group_at(self, at: int) -> str:
        """The group that serves the users at this position."""
        for part in self.parts:
            if at < part.share:
                return part.group
            at -= part.share
        return self.parts[-1].group

    def share_of(self, group: str) -> int:
        """The group's part of the users, in 10,000ths; 0 for one that the routes do not name."""
        return next((part.share for part in self.parts if part.group == group), 0)

    def lanes_of(self, group: str) -> int:
        """The group's number of lanes; 0 for one that the routes do not name."""
        return next((part.lanes for part in self.parts if part.group == group), 0)

    def on_trial(self, group: str) -> bool:
        """Whether the group has no users since its rollout has only begun, or went back: nobody may fall back to it."""
        rollout = self.rollout or None
        unfinished = rollout is not None and rollout.group == group and rollout.state != "done"
        return unfinished and not self.share_of(group)

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups, those without users, too, which may still keep something of them."""
        return tuple(part.group for part in self.parts)

    def moved(self, to: str, lanes: int, share: int) -> Self:
        """The routes with this share of the users in the group `to`, which has so many lanes, and a later epoch.

        Its users stay in it while its share grows, and no other user moves. A group without users gets the first place.
        It takes users from the groups beside it, the earlier one first, and gives them back to the later one.
        """
        parts = list(self.parts)
        if not (before := self.share_of(to)):
            parts = [RoutePart(group=to, share=0, lanes=lanes), *(part for part in parts if part.group != to)]
        at = next(index for index, part in enumerate(parts) if part.group == to)
        parts[at] = RoutePart(group=to, share=share, lanes=lanes)
        earlier, later = [*reversed(range(at))], [*range(at + 1, len(parts))]
        change = share - before
        if change <= 0:  # to the nearest group with users, since those between have no place
            last = [*later, *earlier]
            earlier, later = [], [next((index for index in last if parts[index].share), last[0])] if last else []
        for index in (*earlier, *later):
            taken = min(change, parts[index].share)  # negative: given back
            parts[index] = msgspec.structs.replace(parts[index], share=parts[index].share - taken)
            change -= taken
        return msgspec.structs.replace(self, epoch=self.epoch + 1, parts=tuple(parts))

    def grown(self, group: str, lanes: int) -> Self:
        """The routes with so many lanes in the group, and a later epoch."""
        parts = (replace(part, lanes=lanes) if part.group == group else part for part in self.parts)
        return replace(self, epoch=self.epoch + 1, parts=tuple(parts))

    @classmethod
    def of_one(cls, group: str, lanes: int, epoch: int = 0) -> Self:
        """All users in one group."""
        return cls(epoch=epoch, sent_ms=0, parts=(RoutePart(group=group, share=POSITIONS, lanes=lanes),))


def position(user_id: str) -> int:
    """A user's place among POSITIONS: the high bits of the hash whose remainder is the lane, so that each part of the
    users is spread over all lanes."""
    return (murmur2(user_id.encode()) & 0x7FFFFFFF) * POSITIONS >> 31


def routes_topic(topics: TopicSet) -> Topic:
    """The topic as it is made: kept as `worker-status` is, in one partition."""
    status = topics.worker_status
    name = status.name.removesuffix("worker-status") + TOPIC
    told = {
        "key": "default, a scenario's name or assignments",
        "message": "Routes",
        "producers": ("operators",),
        "consumers": ("service", "trigger", "workers", "operators"),
    }
    return msgspec.structs.replace(status, name=name, min_compaction_lag_ms=None, **told)


def group_settings(settings: Settings, group: str, lanes: int) -> Settings:
    """The settings of what belongs to a group of this relay."""
    if group == OWN:
        return settings
    if any(scenario.name == group for scenario in settings.scenarios):
        settings = settings.serving(group)
    else:
        kafka = msgspec.structs.replace(settings.kafka, prefix=f"{settings.kafka.prefix}{group}.")
        settings = msgspec.structs.replace(settings, kafka=kafka)
    return msgspec.structs.replace(settings, kafka=msgspec.structs.replace(settings.kafka, partitions=lanes))


_encoder = msgspec.msgpack.Encoder()
_decoder = VersionedDecoder(Routes, min_v=1)


def encode_routes(routes: Routes) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(routes)


def key_of(scenario: str) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Key and headers of a scenario's record; "": of the requests that are of none."""
    return (scenario.encode(), [(HEADER_KIND, KIND.encode())]) if scenario else (KEY, [])


def with_newer(record: Record, reader: StatusReader, known: Mapping[str, Routes]) -> Mapping[str, Routes]:
    """The routes by scenario ("": of the requests that are of none), with those of the record if its epoch is not lower
    than that of the known ones; else `known` itself.

    Signed as the statuses are. Raises DecodeError for a record that is not to be believed.
    """
    kind = kind_of(record.headers)
    if kind not in ("", KIND) or (found := reader.other(record, kind, _decoder)) is None:
        return known
    scenario = (record.key or b"").decode(errors="replace") if kind else ""
    found.validate()
    if kind and not NAME.fullmatch(scenario):
        raise DecodeError("invalid", f"the key {scenario[:30]!r} is no scenario's name")
    if found.epoch > time.time() * 1e3 + MAX_AHEAD_MS:
        raise DecodeError("invalid", f"epoch {found.epoch} is more than a day ahead, and no later one would count")
    before = known.get(scenario)
    if before is None and kind and len(known.keys() - {OWN}) >= MAX_SCENARIOS:  # a writer would fill memory with names
        raise DecodeError("invalid", f"scenario {scenario!r}: {MAX_SCENARIOS} others are known, more are not followed")
    return known if before is not None and found.epoch < before.epoch else {**known, scenario: found}


def announced_lanes(routes: Mapping[str, Routes]) -> dict[str, int]:
    """The numbers of lanes that clients go by, by group."""
    found: dict[str, int] = {}
    for part in (part for each in routes.values() for part in each.parts):
        found[part.group] = max(part.lanes, found.get(part.group, 0))
    return found
