"""Records become tasks or typed refusals, whatever they contain and whatever clock their sender has."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from prometheus_client import Counter

from relaygr_stream.bus.ages import LogEnd, now_ms
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Relay
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, candidate_fields
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from relaygr_stream.worker.intake import Intake, IntakeLimits, Origin, TooMuch
from tests.properties import examples

LIMITS = Relay(max_prefix_tokens=8, max_suffix_tokens=4, max_candidates=5, life_window_ms=2000.0)
ROUTE = ((HEADER_CORRELATION, b"c-1"), (HEADER_REPLY_PARTITION, b"3"))
HOUR_MS = 3_600_000


class Desk(Intake):
    """An intake that counts clocks that are off."""

    def __init__(self) -> None:
        self._clocks = Counter("clocks", "", registry=None)
        super().__init__(IntakeLimits(LIMITS, 1000.0, 4, max_bytes=10_000), self._clocks)

    @property
    def clamped(self) -> float:
        return next(iter(self._clocks.collect())).samples[0].value


def history(length: int, start: int = 1000) -> Behaviours:
    return Behaviours.from_arrays(np.arange(length), np.zeros(length, int), np.arange(length) * 10 + start)


def request(**changes: Any) -> RankingRequest:
    whole = RankingRequest(
        request_id="r", user_id="u", prefix=history(3), suffix=history(2, 2000), candidates=pack_items([5, 6])
    )
    return msgspec.structs.replace(whole, **changes)


def signal(**changes: Any) -> PreInferSignal:
    whole = PreInferSignal(
        request_id="r", user_id="u", prefix=history(3), admitted_ms=0, life_ms=5000.0, rank_in_ms=80.0
    )
    return msgspec.structs.replace(whole, **changes)


def record(value: bytes | None, headers: Any = ROUTE, offset: int = 7, topic: str = "ranking") -> Record:
    return Record(topic, 2, offset, 0, b"u", value, headers)


def test_a_ranking_becomes_a_task() -> None:
    desk, before = Desk(), time.monotonic()
    whole = record(encode(request(timeout_ms=300.0)))
    origin = desk.route(whole)
    task = desk.ranking(whole, origin, time.monotonic()).task
    assert (origin.record, origin.reply_partition, origin.correlation, origin.trace) == (whole, 3, b"c-1", None)
    assert (task.request_id, task.user_id, task.lane, task.full) == ("r", "u", 2, False)
    assert task.tokens.array.tolist() == [[0, 1, 2], [0, 0, 0], [0, 10, 10]]
    assert task.suffix.array[2].tolist() == [2000 - 1020, 10]  # its first gap reaches back into the prefix
    assert task.candidates.tolist() == [5, 6]
    assert before + 0.3 <= task.deadline <= time.monotonic() + 0.3
    assert desk.ranking(record(encode(request(mode="full"))), origin, time.monotonic()).task.full


def test_item_ids_of_64_bits_become_tokens_and_candidates() -> None:
    ids = [7, 2**32, 2**53 + 1, 2**63 - 1]
    whole = Behaviours.from_arrays(ids, [1] * 4, range(4))
    wide = request(
        prefix=whole, suffix=Behaviours.from_arrays(ids[:1], [1], [9]), **candidate_fields(ids, UNSET, whole)
    )
    one = record(encode(wide))
    task = Desk().ranking(one, Desk().route(one), time.monotonic()).task
    assert task.tokens.array[0].tolist() == task.candidates.tolist() == ids
    assert task.suffix.array[0].tolist() == ids[:1]
    asked = record(encode(signal(prefix=whole, v=4, min_v=4)))
    assert Desk().signal(asked, time.monotonic()).task.tokens.array[0].tolist() == ids
    most = candidate_fields([*ids, 1, 2], UNSET)
    with pytest.raises(TooMuch, match="6 candidates, the limit is 5"):
        Desk().ranking(record(encode(request(**most))), NOWHERE, time.monotonic())


def test_without_a_timeout_the_default_counts() -> None:
    task = Desk().ranking(record(encode(request())), Origin(record(b""), 0, b"c"), time.monotonic()).task
    assert task.deadline - task.arrived == pytest.approx(1.0)


@pytest.mark.parametrize(("timeout_ms", "due_ms"), [(300.0, 293.0), (10.0, 8.0)])
def test_scores_leave_so_early_that_they_are_there_in_time(timeout_ms: float, due_ms: float) -> None:
    """Of a short timeout, only a part is left for the way."""
    whole = record(encode(request(timeout_ms=timeout_ms)))
    task = Desk().ranking(whole, Origin(whole, 0, b"c"), time.monotonic(), reply_ms=7.0).task
    assert (task.deadline - task.arrived) * 1e3 == pytest.approx(due_ms)


@pytest.mark.parametrize("served", [[], ["feed"], ["feed", "search"]], ids=["none", "one", "two"])
@given(
    named=st.just(UNSET)
    | st.sampled_from(["feed", "search", "video"])
    | st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=100)
)
def test_what_names_a_scenario_that_its_group_does_not_serve_counts_as_the_groups_own(
    served: list[str], named: Any
) -> None:
    misnamed, several = Counter("misnamed", "", registry=None), len(served) > 1
    slos_ms = dict(zip(served, (50.0, 20.0), strict=False)) if several else {}
    limits = IntakeLimits(LIMITS, 1000.0, 4, max_bytes=10_000, scenario="".join(served[:1]), slos_ms=slos_ms)
    intake = Intake(limits, misnamed=misnamed)
    asked = record(encode(request(scenario=named)))
    rank = intake.ranking(asked, intake.route(asked), time.monotonic()).task
    prefill = intake.signal(record(encode(signal(scenario=named))), time.monotonic()).task
    known = named in served
    assert rank.scenario == prefill.scenario == ((named if known else served[0]) if several else "")
    if several:
        assert rank.times.due - rank.arrived == pytest.approx(slos_ms[rank.scenario] / 1e3)
    assert next(iter(misnamed.collect())).samples[0].value == (2 if named and not known else 0)


def test_a_signal_becomes_a_task_with_its_window_capped() -> None:
    before = time.monotonic()
    task = Desk().signal(record(encode(signal()), topic="pre-infer"), time.monotonic()).task
    short = Desk().signal(record(encode(signal(life_ms=500.0, rank_in_ms=0.0))), time.monotonic()).task
    after = time.monotonic()
    for moment, seconds in ((task.due, 0.08), (task.expires, 2.0), (short.due, 0.5), (short.expires, 0.5)):
        assert before + seconds <= moment <= after + seconds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefix": history(9), "suffix": Behaviours()}, "9 prefix behaviours, the limit is 8 (relay.max_prefix_tok"),
        ({"suffix": history(5, 9000)}, "5 suffix behaviours, the limit is 4 (relay.max_suffix_tokens)"),
        ({"candidates": pack_items(range(6))}, "6 candidates, the limit is 5 (relay.max_candidates)"),
    ],
)
def test_what_is_too_much_is_said_with_number_limit_and_setting(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TooMuch) as caught:
        Desk().ranking(record(encode(request(**change))), Origin(record(b""), 0, b"c"), time.monotonic())
    assert words in str(caught.value)
    assert (caught.value.request_id, caught.value.user_id) == ("r", "u")


def test_limits_themselves_are_taken() -> None:
    whole = request(prefix=history(8), suffix=history(4, 9000), candidates=pack_items(range(5)))
    task = Desk().ranking(record(encode(whole)), Origin(record(b""), 0, b"c"), time.monotonic()).task
    assert (len(task.tokens), len(task.suffix), len(task.candidates)) == (8, 4, 5)
    assert len(Desk().signal(record(encode(signal(prefix=history(8)))), time.monotonic()).task.tokens) == 8


def test_a_signal_too_long_is_invalid() -> None:
    with pytest.raises(DecodeError, match=r"9 prefix behaviours, the limit is 8 \(relay\.max_prefix_tokens\)"):
        Desk().signal(record(encode(signal(prefix=history(9)))), time.monotonic())


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ROUTE[:1],
        ROUTE[1:],
        ((HEADER_CORRELATION, b""), ROUTE[1]),
        ((HEADER_CORRELATION, b"x" * 65), ROUTE[1]),
        *(
            ((ROUTE[0], (HEADER_REPLY_PARTITION, text)))
            for text in (b"", b"4", b"-1", b"+1", b"1e0", b"\xb2", b"9" * 99)
        ),
        ((HEADER_CORRELATION, None), ROUTE[1]),  # Kafka's null: once ended the worker
        (ROUTE[0], (HEADER_REPLY_PARTITION, None)),
    ],
)
def test_routes_that_lead_nowhere(headers: Any) -> None:
    with pytest.raises(DecodeError, match="header relaygr-"):
        Desk().route(record(b"", headers))


@pytest.mark.parametrize("text", [b"0", b"3", b"0003"])
def test_routes(text: bytes) -> None:
    headers = (("other", b"x"), (HEADER_CORRELATION, b"y" * 64), (HEADER_REPLY_PARTITION, text))
    assert Desk().route(record(b"", headers)).reply_partition == int(text)


def behaviour(time_ms: int) -> Behaviours:
    """One at this time, whether that is a time or not."""
    return Behaviours(bytes(4), bytes(1), time_ms.to_bytes(8, "little", signed=True))


def test_times_whose_differences_do_not_fit_are_refused() -> None:
    """Once an OverflowError in every worker that read it."""
    prefix, suffix = behaviour(1 - (1 << 63)), behaviour((1 << 63) - 1)
    for change in ({"prefix": prefix, "suffix": suffix}, {"prefix": Behaviours(), "suffix": suffix}):
        with pytest.raises(DecodeError, match="Unix milliseconds"):
            Desk().ranking(record(encode(request(**change))), Origin(record(b""), 0, b"c"), time.monotonic())
    with pytest.raises(DecodeError, match="Unix milliseconds"):
        Desk().signal(record(encode(signal(prefix=prefix))), time.monotonic())


# ---- clocks ----


def test_times_at_the_bound_itself_are_refused() -> None:
    """Two of them are 2⁶³ ms apart, which once ended the process with an OverflowError."""
    first, last = behaviour(-(1 << 62)), behaviour(1 << 62)
    desk = Desk()
    bad = record(encode(request(prefix=first, suffix=last)))
    with pytest.raises(DecodeError, match="times must be Unix milliseconds"):
        desk.ranking(bad, desk.route(bad), time.monotonic())


def end_of_log(desk: Intake, offset: int, ago_s: float) -> None:
    """The ranking lane ended at `offset` so long ago."""
    then = time.monotonic() - ago_s
    desk.sample_ages("ranking", {2: LogEnd(offset, then, then)})


def left_s(desk: Intake, sent_ms: int, offset: int = 7) -> float:
    """Time left of a timeout of a second."""
    task = desk.ranking(
        record(encode(request(sent_ms=sent_ms, timeout_ms=1000.0)), offset=offset), NOWHERE, time.monotonic()
    ).task
    return task.deadline - task.arrived


NOWHERE = Origin(record(b""), 0, b"c")


def test_age_counts_against_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a lane that was another's there are no samples yet; what other lanes' senders state tells how old it is."""
    monkeypatch.setattr(time, "time", lambda: 1e9)  # a pause of this process changes no age
    monkeypatch.setattr(time, "monotonic", lambda: 1e3)
    desk = Desk()
    assert left_s(desk, now_ms() - 5000) == pytest.approx(1.0, abs=0.05), "nothing is known of the senders yet"
    end_of_log(desk, 7, ago_s=0.2)
    assert left_s(desk, now_ms() - 10, offset=7) == pytest.approx(1.0, abs=0.05)  # fresh
    desk.lanes_lost([2])
    assert left_s(desk, now_ms() - 400) == pytest.approx(0.6, abs=0.05)
    assert left_s(desk, now_ms() - 5000) < 0  # in a backlog: expired
    assert left_s(desk, 0) == pytest.approx(1.0)
    assert desk.clamped == 0


@pytest.mark.parametrize("skew_ms", [-HOUR_MS, -300_000, -1000, 1000, 300_000, HOUR_MS])
def test_a_fresh_request_from_a_clock_that_is_off_is_not_expired(skew_ms: int) -> None:
    """Our clock ahead of the sender's once expired everything."""
    desk = Desk()
    end_of_log(desk, 7, ago_s=0.2)
    assert left_s(desk, now_ms() + skew_ms, offset=7) == pytest.approx(1.0, abs=0.05)
    assert desk.clamped == 1
    task = desk.signal(record(encode(signal(admitted_ms=now_ms() + skew_ms)), topic="pre-infer"), time.monotonic()).task
    assert task.expires > time.monotonic()  # that lane's end is not known yet


def test_an_old_request_is_old_whatever_its_sender_says() -> None:
    desk = Desk()
    end_of_log(desk, 8, ago_s=3.0)
    assert left_s(desk, now_ms() + 300_000, offset=7) < -1.9
    assert desk.clamped == 1
    assert left_s(desk, 0, offset=7) < -1.9


@pytest.mark.parametrize("behind_ms", [60, 150, 250, 340, 500])
@pytest.mark.parametrize("timeout_ms", [100.0, 200.0])
def test_a_clock_that_is_a_little_behind_expires_nothing(
    behind_ms: int, timeout_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 62 % were late on arrival: the ages of a quarter of a second were what the sender said."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    monkeypatch.setattr(time, "monotonic", lambda: 1e3)
    desk = Desk()
    end_of_log(desk, 5, ago_s=0.25)
    for offset in range(5, 25):
        due = record(encode(request(sent_ms=now_ms() - behind_ms, timeout_ms=timeout_ms)), offset=offset)
        task = desk.ranking(due, NOWHERE, time.monotonic()).task
        assert task.deadline - task.arrived > 0.6 * timeout_ms / 1e3


def test_what_a_lane_told_is_forgotten_with_the_lane() -> None:
    desk = Desk()
    end_of_log(desk, 8, ago_s=3.0)
    desk.lanes_lost([2])
    assert left_s(desk, now_ms(), offset=7) == pytest.approx(1.0, abs=0.05)


# ---- garbage ----

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["v", "request_id", "user_id", "prefix", "suffix", "candidates", "sent_ms", "timeout_ms", "mode", "life_ms"]
TIMES = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10).map(sorted)
PARTS = st.builds(
    lambda times, items: {
        "items": np.resize(np.array(items or [0], "<u4"), len(times)).tobytes(),
        "actions": bytes(len(times)),
        "times": np.array(times, "<i8").tobytes(),
    },
    TIMES,
    st.lists(st.integers(0, 2**32 - 1), max_size=3),
)


@settings(max_examples=examples(150))
@given(
    data=st.binary(max_size=200)
    | st.builds(
        lambda base, change: msgpack.packb({**base, **change}),
        st.sampled_from([msgspec.to_builtins(whole, builtin_types=(bytes,)) for whole in (request(), signal())]),
        st.dictionaries(st.sampled_from(FIELDS), VALUES | PARTS, max_size=3),
    ),
    headers=st.lists(st.tuples(st.sampled_from([HEADER_CORRELATION, HEADER_REPLY_PARTITION]), st.none() | st.binary())),
)
@example(data=b"\x81" * 9999, headers=[])
@example(data=b"\xc6\xff\xff\xff\xff", headers=[])
def test_garbage_is_refused_with_a_type_or_taken(data: bytes, headers: list[Any]) -> None:
    desk = Desk()
    whole = record(data, (*headers, *ROUTE) if len(headers) % 2 else tuple(headers))
    with suppress(DecodeError):
        assert 0 <= desk.route(whole).reply_partition < 4
    with suppress(DecodeError, TooMuch):
        task = desk.ranking(whole, NOWHERE, time.monotonic()).task
        assert len(task.tokens) <= 8
        assert np.isfinite(task.deadline)
    with suppress(DecodeError):
        assert 1 <= len(desk.signal(whole, time.monotonic()).task.tokens) <= 8


def test_size_is_checked_before_decoding() -> None:
    with pytest.raises(DecodeError, match="oversized"):
        Desk().ranking(record(b"x" * 10_001), NOWHERE, time.monotonic())
    with pytest.raises(DecodeError, match="no value"):
        Desk().signal(record(None), time.monotonic())


def test_every_byte_that_a_waiting_ranking_holds_is_counted() -> None:
    """Names, keys and objects: an empty header is a hundred bytes, and a name may have four bytes a character."""
    value = encode(request())
    plain = record(value)
    counted = [
        Desk().ranking(one, Origin(one, 0, b"c"), time.monotonic()).task.nbytes
        for one in (
            plain,
            plain._replace(headers=(*ROUTE, *[("", b"")] * 90)),
            plain._replace(headers=(*ROUTE, ("n" * 100_000 + "\U0001f3c3", b"v"))),
            plain._replace(key=b"k" * 100_000),
        )
    ]
    more = [nbytes - counted[0] for nbytes in counted[1:]]
    assert more[0] >= 90 * 100
    assert more[1] >= 400_000
    assert more[2] >= 99_000
