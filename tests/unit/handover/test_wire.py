"""Messages and frames: what goes in comes out, and nothing else comes out of anything."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.errors import DecodeError
from relaygr_stream.handover.wire import (
    MAX_ASK,
    TOKEN_BYTES,
    Ask,
    End,
    Enough,
    Message,
    Offer,
    PrefixIdentity,
    SessionRefused,
    SkipOffer,
    Take,
    decode,
    encode,
    max_offer_bytes,
)
from relaygr_stream.models.api import Tokens

TEXT = st.text(max_size=64)
IDS = st.text(min_size=1, max_size=256)
COUNTS = st.integers(0, 2**31)
IDENTITIES = st.builds(
    PrefixIdentity,
    model_version=TEXT,
    layers=COUNTS,
    heads=COUNTS,
    dqk=COUNTS,
    dv=COUNTS,
    dtype=TEXT,
    storage=TEXT,
    device=TEXT,
    lanes=st.integers(1, 10_000),
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Ask, IDENTITIES, st.lists(COUNTS, max_size=50).map(tuple)),
    st.builds(SessionRefused, TEXT),
    st.builds(Offer, IDS, st.integers(1, 2**31), st.binary(max_size=200), st.integers(1, 2**40)),
    st.sampled_from([Take(), SkipOffer(), Enough(), End()]),
)


@given(MESSAGES)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


@given(MESSAGES, st.data())
def test_what_is_no_message_is_refused_in_one_way(message: Message, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for hostile in (bytes(payload), bytes(payload[:cut]), data.draw(st.binary(max_size=64))):
        with suppress(DecodeError):
            assert isinstance(decode(hostile), Message)


@given(st.integers(1, 40), st.integers(0, 100))
def test_an_offers_tokens_come_out_as_they_went_in(length: int, slack: int) -> None:
    array = np.random.default_rng(length).integers(-(2**62), 2**62, (3, length))
    offer = decode(encode(Offer.from_tokens("u", Tokens(array), length + slack, 1)))
    assert isinstance(offer, Offer)
    assert np.array_equal(offer.sequence(40).array, array)


@pytest.mark.parametrize(("nbytes", "capacity"), [(0, 64), (TOKEN_BYTES + 1, 64), (65 * TOKEN_BYTES, 64), (48, 1)])
def test_an_offer_of_no_possible_sequence_is_refused(nbytes: int, capacity: int) -> None:
    with pytest.raises(DecodeError, match="tokens"):
        Offer("u", capacity, bytes(nbytes), 1).sequence(64)


def test_the_largest_messages_fit_their_bounds() -> None:
    text = "x" * 512
    identity = PrefixIdentity(
        model_version=text, layers=1, heads=1, dqk=1, dv=1, dtype=text, storage=text, device=text, lanes=10_000
    )
    assert len(encode(Ask(identity, tuple(range(10_000))))) <= MAX_ASK
    longest = Tokens(np.zeros((3, 4352), np.int64))
    assert len(encode(Offer.from_tokens("u" * 256, longest, 2**31, 2**40))) <= max_offer_bytes(4352)
    assert len(encode(SessionRefused("\N{SNOWMAN}" * 512))) <= max_offer_bytes(1)


def test_a_difference_is_told_in_words() -> None:
    ours = PrefixIdentity(
        model_version="a", layers=1, heads=1, dqk=1, dv=1, dtype="float32", storage="exact", device="cpu", lanes=8
    )
    assert ours.difference(ours) == ""
    theirs = PrefixIdentity(
        model_version="b", layers=1, heads=1, dqk=1, dv=1, dtype="float32", storage="int8", device="cpu", lanes=8
    )
    assert ours.difference(theirs) == "model version is a here and b there"
