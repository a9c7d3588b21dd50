"""Records of `worker-status` from those who mean harm: out of bounds, unsigned, forged, written again."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from relaygr_stream.errors import ConfigError, DecodeError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.worker import Handover
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.worker_status import (
    HEADER_INCARNATION,
    MAX_AHEAD_S,
    MAX_BYTES,
    MAX_LANES,
    MAX_OFFSET,
    MAX_SKEW_S,
    MAX_TEXT,
    StatusReader,
    Tombstone,
)
from relaygr_stream.worker.metrics import WorkerMetrics
from tests.statuses import SECRET_CHANGE, lane_statuses, worker_status

TOPIC = "relaygr.worker-status"
SECRET = "a secret of the fleet"
LANES = 4
NOW_S = 1_800_000_000.0


def status(name: str = "w1", **changes: Any) -> WorkerStatus:
    stated = {"incarnation": int(NOW_S * 1e9), "sent_ms": int(NOW_S * 1e3), "lanes": lane_statuses([0]), **changes}
    return worker_status(name, **stated)


def of_lane(**changes: Any) -> dict[str, Any]:
    return {"lanes": lane_statuses([0], **changes)}


def record(
    value: bytes | None, key: bytes = b"w1", signer: Signer | None = None, *headers: tuple[str, bytes]
) -> Record:
    signed = tuple(signer.sign(TOPIC, key, value, headers)) if signer else headers
    return Record(TOPIC, 0, 7, 0, key, value, signed)


def reader(signer: Signer | None = None) -> StatusReader:
    return StatusReader(LANES, signer, wall=lambda: NOW_S)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"incarnation": 2**64 - 1}, "incarnation"),
        ({"incarnation": int((NOW_S + MAX_AHEAD_S + 1) * 1e9)}, "incarnation"),
        ({"incarnation": -1}, "incarnation"),
        ({"queue_ms": float("nan")}, "queue_ms"),
        ({"queue_ms": 1e300}, "queue_ms"),
        ({"pre_infer_wait_ms": float("inf")}, "pre_infer_wait_ms"),
        ({"head_start_ms": -1.0}, "head_start_ms"),
        ({"busy_share": 1.5}, "busy_share"),
        ({"busy_share": float("nan")}, "busy_share"),
        ({"bytes_per_token": 0}, "bytes_per_token"),
        ({"bytes_per_token": 2**60}, "bytes_per_token"),
        ({"alloc_bytes": -1}, "alloc_bytes"),
        ({"hbm_bytes": 2**63}, "hbm_bytes"),
        ({"counters": {f"c{n}": 1.0 for n in range(10_000)}}, "counters"),
        ({"counters": {"c": float("nan")}}, "counter 'c'"),
        ({"counters": {"c" * 1000: 1.0}}, "name of a counter"),
        ({"host": "h" * 10_000}, "host"),
        ({"lanes": lane_statuses([0, 0])}, "twice"),
        ({"lanes": lane_statuses(range(LANES + 1))}, "lanes"),
        (of_lane(lane=LANES), "lane=4"),
        (of_lane(lane=-1), "lane=-1"),
        (of_lane(budget_bytes=2**62), "budget_bytes"),
        (of_lane(pinned_bytes=-5), "pinned_bytes=-5"),
        (of_lane(pre_infer_offset=2**63), "pre_infer_offset"),
        (of_lane(ranking_offset=-1), "ranking_offset=-1"),
    ],
)
def test_a_number_or_text_out_of_bounds_is_refused_and_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DecodeError, match=named):
        reader().read(record(encode(status(**changes))))


def test_a_status_has_so_many_bytes_for_each_of_its_lanes() -> None:
    """What a reader keeps of 20,000 names that anybody may write is bounded with it."""
    filled = status(counters={f"{n:0300d}": 1.0 for n in range(100)})
    with pytest.raises(DecodeError, match="bytes with 1 lanes, the limit is") as refused:
        reader().read(record(encode(filled)))
    assert refused.value.reason == "oversized"


def test_the_largest_status_is_read() -> None:
    """Every lane of the largest cluster at the largest numbers, and twice today's counters; else all texts are long."""
    most = {
        "budget_bytes": MAX_BYTES,
        "pinned_bytes": MAX_BYTES,
        "pre_infer_offset": MAX_OFFSET,
        "ranking_offset": MAX_OFFSET,
        "device_ms_per_s": 0.1,
    }
    counters = {f"a_counter_with_a_long_name_{n}": 0.1 for n in range(100)}
    everything = status(lanes=lane_statuses(range(MAX_LANES), **most), counters=counters)
    assert StatusReader(wall=lambda: NOW_S).read(record(encode(everything))) == everything
    long, ids = "m" * MAX_TEXT, tuple(f"{n:064}" for n in range(16))
    texts = {"host": long, "device": long, "model_version": long, "model_note": long, "handover": long}
    wordy = status(**texts, counters=counters, erased=ids, version="v" * 128)
    assert reader().read(record(encode(wordy))) == wordy


def test_a_status_under_another_key_speaks_for_nobody() -> None:
    with pytest.raises(DecodeError, match=r"the key is 'w2', the status that of 'w1'"):
        reader().read(record(encode(status()), key=b"w2"))


def test_records_of_another_kind_are_of_no_worker() -> None:
    assert reader().read(record(b"\xc1", b"trigger/t", None, ("relaygr-kind", b"trigger"))) is None


def test_with_a_secret_only_who_has_it_is_believed() -> None:
    ours, theirs = Signer(SECRET), Signer("another secret of 16")
    good = record(encode(status()), signer=ours)
    assert reader(ours).read(good) == status()
    assert reader().read(good) == status()  # who has no secret believes everybody
    for forged in (
        record(encode(status())),
        record(encode(status()), signer=theirs),
        good._replace(value=encode(status(queue_ms=1.0))),
        good._replace(key=b"w2"),
        good._replace(topic="other.worker-status"),
        good._replace(value=None),
        good._replace(headers=(*good.headers, (HEADER_INCARNATION, b"7"))),
        good._replace(headers=(*good.headers, *good.headers)),
    ):
        with pytest.raises(DecodeError) as refused:
            reader(ours).read(forged)
        assert refused.value.reason == "unsigned"


@pytest.mark.parametrize(("before", "after"), [*itertools.pairwise(SECRET_CHANGE)])
def test_while_a_secret_is_changed_every_process_is_believed(before: Handover, after: Handover) -> None:
    for ours, theirs in itertools.product((before, after), repeat=2):
        assert (
            reader(Signer.from_settings(ours)).read(record(encode(status()), signer=Signer.from_settings(theirs)))
            == status()
        )


@pytest.mark.parametrize("former", SECRET_CHANGE[:2])
def test_after_its_change_a_former_secret_is_not_believed(former: Handover) -> None:
    with pytest.raises(DecodeError, match="not one made with"):
        reader(Signer.from_settings(SECRET_CHANGE[-1])).read(
            record(encode(status()), signer=Signer.from_settings(former))
        )


def test_an_accepted_secret_alone_signs_nothing_and_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`handover\.accepted_secret` is set without `handover\.secret`"):
        Signer.from_settings(Handover(accepted_secret=SECRET))


@given(st.binary(max_size=40), st.one_of(st.none(), st.binary(max_size=80)), st.integers(0, 1000))
def test_no_changed_bit_of_a_signed_record_is_believed(key: bytes, value: bytes | None, at: int) -> None:
    signer = Signer(SECRET)
    whole = record(value, key, signer, (HEADER_INCARNATION, b"12"))
    assert signer.verifies(whole)
    part = at % 3
    if part == 0 and key:
        place = at % len(key)
        assert not signer.verifies(whole._replace(key=key[:place] + bytes([key[place] ^ 1]) + key[place + 1 :]))
    elif part == 1 and value:
        place = at % len(value)
        assert not signer.verifies(whole._replace(value=value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]))
    else:
        assert not signer.verifies(whole._replace(headers=((HEADER_INCARNATION, b"13"), *whole.headers[1:])))
        assert not signer.verifies(
            whole._replace(key=key + b"1", headers=((HEADER_INCARNATION, b"2"), *whole.headers[1:]))
        )


def test_a_signed_status_that_was_recorded_counts_no_second_time() -> None:
    signer, registry = Signer(SECRET), CollectorRegistry()
    directory = OwnerDirectory(3000.0, WorkerMetrics(registry), clock=lambda: 0.0, reader=reader(signer))

    def said(at_ms: int, **changes: Any) -> Record:
        return record(encode(status(sent_ms=int(NOW_S * 1e3) + at_ms, **changes)), signer=signer)

    first, second = said(0), said(250, lanes=())
    directory.on_records([first, second])
    assert directory.owner(0) is None
    directory.on_records([first])  # written again, to give the lane an owner that does not have it any more
    assert directory.owner(0) is None
    old = said(-int(1e3 * (MAX_SKEW_S + 1)), name="w1", incarnation=1)
    directory.on_records([old])
    assert registry.get_sample_value("relaygr_statuses_unsigned_total") == 1


def test_a_forged_incarnation_ends_no_name_for_good() -> None:
    """The largest that is believed is within a day: the next start of the name is later, and counts again."""
    directory = OwnerDirectory(3000.0, reader=StatusReader(LANES))
    forged = int((time.time() + MAX_AHEAD_S - 60) * 1e9)
    directory.on_records([record(encode(status(incarnation=forged, lanes=())))])
    directory.on_records([record(encode(status(incarnation=forged + 1)))])
    claim = directory.owner(0)
    assert claim is not None
    assert claim.worker.incarnation == forged + 1


def test_a_tombstone_removes_the_incarnation_that_it_names() -> None:
    directory = OwnerDirectory(3000.0, reader=reader())
    good = record(encode(status()))
    directory.on_records([good])
    directory.on_records([record(None, b"w1", None, (HEADER_INCARNATION, b"5"))])  # an earlier one, that never served
    assert directory.owner(0) is not None
    directory.on_records([record(None, b"w1", None, (HEADER_INCARNATION, str(status().incarnation).encode()))])
    assert directory.owner(0) is None
    directory.on_records([good])
    assert directory.owner(0) is not None
    directory.on_records([record(None)])
    assert directory.workers() == {}


def test_what_a_tombstone_says() -> None:
    for text, incarnation in ((b"17", 17), (b"", -1), (b"1e5", -1), (b"9" * 40, -1)):
        found = reader().read(record(None, b"w1", None, (HEADER_INCARNATION, text)))
        assert found == Tombstone("w1", incarnation)
