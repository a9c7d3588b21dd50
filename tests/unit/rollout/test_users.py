"""Users who may move: what they are worth, what is kept of them, and who is forgotten when there are too many."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relaygr_stream.ops.rollout.users import OBJECT_BYTES, KnownUsers, User
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.features import FeatureTables
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, with_version
from relaygr_stream.wire.routes import POSITIONS, Routes
from tests.unit.client_peers import request

LANES = 8
NONE, ALL = Routes.of_one("", LANES), Routes.of_one("next", LANES)


def behaviours(count: int) -> Behaviours:
    return Behaviours.from_arrays([1] * count, [0] * count, range(count))


def ranked(user: str = "u", tokens: int = 10, **changes: object) -> RankingRequest:
    return msgspec.structs.replace(request(user_id=user), **{"prefix": behaviours(tokens), **changes})


def everyone(known: KnownUsers) -> dict[str, User]:
    return {user.key: user for user in known.moving(NONE, ALL, "next")}


def signal_of(known: KnownUsers, key: str = "u") -> PreInferSignal:
    signal = everyone(known)[key].signal
    assert signal is not None
    return decode(PreInferSignal, encode(signal))


def test_the_newest_history_counts_with_the_number_of_uses() -> None:
    known = KnownUsers(LANES)
    for tokens in (10, 12, 15):
        known.ranked(ranked(tokens=tokens))
    (user,) = everyone(known).values()
    assert (user.uses, user.tokens, user.worth) == (3, 15, 45)
    assert signal_of(known).prefix == behaviours(15)
    assert known.nbytes == OBJECT_BYTES + behaviours(15).nbytes()


def test_tenants_share_no_users() -> None:
    known = KnownUsers(LANES)
    known.ranked(ranked(tenant="a"))
    known.ranked(ranked(tenant="b"))
    assert {user.signal.tenant for user in everyone(known).values() if user.signal} == {"a", "b"}


@pytest.mark.parametrize("changes", [{"hops": 1}, {"mode": "full"}, {"prefix": Behaviours()}])
def test_what_leaves_no_prefix_kv_is_no_use(changes: dict[str, Any]) -> None:
    known = KnownUsers(LANES)
    known.ranked(ranked(**changes))
    assert len(known) == 0


def test_a_signal_refers_to_the_history_that_the_ranking_refers_to() -> None:
    known, reference = KnownUsers(LANES), HistoryReference.from_behaviours(behaviours(20))
    known.ranked(ranked(tokens=0, **with_version(reference)))
    assert signal_of(known).history == reference
    assert everyone(known)["u"].tokens == 20


def test_a_signal_has_the_users_features_and_not_the_candidates() -> None:
    known = KnownUsers(LANES)
    columns = FeatureTables("digest", {"age": b"\x01\x00\x00\x00"}, {"price": bytes(12)})
    known.ranked(ranked(columns=columns))
    assert signal_of(known).columns == FeatureTables("digest", {"age": b"\x01\x00\x00\x00"})
    assert everyone(known)["u"].tokens == 11  # the user's features are a token


def test_who_was_sent_is_not_kept_again() -> None:
    known = KnownUsers(LANES)
    known.ranked(ranked())
    user = everyone(known)["u"]
    known.sent(user)
    assert known.nbytes == OBJECT_BYTES
    known.ranked(ranked(tokens=12))
    assert (user.signal, user.uses) == (None, 2)
    known.drop(["u"])
    known.sent(user)  # its acknowledgement comes later
    assert (known.nbytes, len(known)) == (0, 0)


def test_too_many_histories_leave_the_users_of_most_worth() -> None:
    each = OBJECT_BYTES + behaviours(10).nbytes()
    known = KnownUsers(LANES, most_bytes=8 * each)
    for number in range(8):
        known.ranked(ranked(f"u{number}"))
    for number in (1, 6):
        known.ranked(ranked(f"u{number}"))
    known.ranked(ranked("u8"))
    assert {"u1", "u6"} < everyone(known).keys()
    assert len(known) == 5
    assert known.nbytes == 5 * each


def test_who_has_moved_is_forgotten_and_who_moves_is_found() -> None:
    known = KnownUsers(LANES)
    users = [f"u{number}" for number in range(200)]
    for user in users:
        known.ranked(ranked(user))
    now = Routes.of_one("", LANES).moved("next", LANES, POSITIONS // 4)
    then = now.moved("next", LANES, POSITIONS // 2)
    expected = {user for user in users if then.group_of(user) == "next" != now.group_of(user)}
    assert {user.user_id for user in known.moving(now, then, "next")} == expected
    known.moved(now, "next")
    assert set(known.keys) == {user for user in users if now.group_of(user) == ""}
