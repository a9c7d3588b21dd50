"""What a worker remembers of the trigger's word on requests: as often as it is asked, bounded, nothing that is late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.messages import tenant_key
from relaygr_stream.wire.refusals import MAX_IDS, Refusal, Refusals, decode_refusals, encode_refusals
from relaygr_stream.worker.books import MAX_REQUESTS, Decisions

NOW_S = 1000.0


def told(*refused: Refusal) -> Refusals:
    """As it comes over the bus."""
    return decode_refusals(encode_refusals(refused))


@given(st.lists(st.tuples(st.text(min_size=1, max_size=5), st.sampled_from(["over_load", "stale"])), max_size=MAX_IDS))
def test_each_word_is_told_to_every_answer(refused: list[tuple[str, str]]) -> None:
    known = Decisions(2000.0)
    known.note(told(*(Refusal(*each) for each in refused)), 0.0, NOW_S)
    for request_id in {each for each, _ in refused}:
        key = tenant_key("", request_id)
        said = known.admission(key)
        assert said in {reason for each, reason in refused if each == request_id}
        assert known.admission(key) == said, "a request may be ranked again"


def test_what_is_late_or_older_than_what_is_remembered_tells_nothing() -> None:
    known = Decisions(2000.0)
    known.note(told(Refusal("r", "stale")), 2001.0, NOW_S)
    assert known.admission("r") == ""
    for first in ("first", "again"):
        known.admitted(first)
    for number in range(MAX_REQUESTS - 1):
        known.admitted(str(number))
        if number == 0:
            known.admitted("again")
    assert known.admission("first") == ""
    assert known.admission("again") == known.admission("0") == "admitted"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"\x80",
        encode_refusals([Refusal(str(n), "stale") for n in range(MAX_IDS + 1)]),
        encode_refusals([Refusal("r", 65 * "x")]),  # an answer has no room for more
    ],
)
def test_what_cannot_be_read_or_names_too_many_is_refused(value: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_refusals(value)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=3), st.sampled_from(["", "t"]), st.sampled_from(["w1", "w2"]))))
def test_a_delegate_is_told_until_it_is_dropped_and_to_its_tenant_alone(delegated: list[tuple[str, str, str]]) -> None:
    known, last = Decisions(2000.0), {(request, tenant): worker for request, tenant, worker in delegated[:MAX_IDS]}
    known.note(told(*(Refusal(request, "delegated", tenant, to) for (request, tenant), to in last.items())), 0.0, NOW_S)
    for (request, tenant), worker in last.items():
        key = tenant_key(tenant, request)
        assert known.admission(key) == "delegated"
        other = tenant_key("other", request)
        assert (known.admission(other), known.delegate(other, NOW_S)) == ("", "")
        asked = [known.delegate(key, NOW_S), known.delegate(key, NOW_S), known.drop_delegate(key, NOW_S)]
        assert asked == [worker] * 3
        assert (known.delegate(key, NOW_S), known.drop_delegate(key, NOW_S)) == ("", "")


def test_a_delegate_counts_for_the_life_window_and_the_newest_are_kept() -> None:
    known = Decisions(2000.0)
    known.note(told(Refusal("a", "delegated", "", "w"), Refusal("b", "delegated", "", "w")), 100.0, NOW_S)
    assert known.delegate("a", NOW_S + 1.8) == "w"
    assert (known.delegate("a", NOW_S + 2.0), known.drop_delegate("b", NOW_S + 2.0)) == ("", "")
    known.note(told(Refusal("first", "delegated", "", "w")), 0.0, NOW_S)
    for start in range(0, MAX_REQUESTS, MAX_IDS):
        ids = range(start, start + MAX_IDS)
        known.note(told(*(Refusal(str(n), "delegated", "", "w") for n in ids)), 0.0, NOW_S)
    assert known.delegate("first", NOW_S) == ""
    assert known.delegate("0", NOW_S) == "w"
