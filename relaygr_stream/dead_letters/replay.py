"""Sending dead letters to where they came from, with their own key and headers, once.

A letter that fails again comes back with a count in its headers, and what came back is not sent again; what was sent is
marked in the dead-letter topic, and what is marked is not sent again either. So replaying never loops, however often it
is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from relaygr_stream.bus.producer import Producer
from relaygr_stream.dead_letters.letter import Letter
from relaygr_stream.errors import BrokerError, BrokerUnavailable
from relaygr_stream.messages import HEADER_REPLAY_OF, HEADER_REPLAYS
from relaygr_stream.settings import Kafka
from relaygr_stream.topics import TopicSet

Verdict = Literal["replayed", "would replay", "replayed before", "came back", "no origin", "no value", "refused"]


def verdict_before(letter: Letter, topics: TopicSet, *, again: bool) -> Verdict:
    """Whether the letter would be replayed, and if not, why. again: also what was replayed already."""
    if letter.origin_topic not in {topic.name for topic in topics.all if topic.name != topics.dead_letter.name}:
        return "no origin"
    if letter.digest:
        return "no value"
    if letter.replayed and not again:
        return "replayed before"
    if letter.replays and not again:
        return "came back"
    return "would replay"


def why(verdict: Verdict) -> str:
    """What an operator can do about a verdict, where that is not clear."""
    if verdict == "no value":
        return "the message was not kept; kafka.dead_letter_values = true keeps those to come (docs/operations.md)"
    return ""


async def replay(
    kafka: Kafka,
    topics: TopicSet,
    letters: Sequence[Letter],
    *,
    again: bool,
    report: Callable[[Letter, Verdict, str], None],
) -> bool:
    """Send what may be sent, in order, each acknowledged and marked before the next; report every letter's verdict.

    Whether nothing was refused. Raises BrokerUnavailable; what was reported until then has happened.
    """
    clean = True
    largest = max(topic.max_message_bytes for topic in topics.all)
    async with Producer(kafka, client_id="relaygr-dead-letters", max_bytes=largest) as producer:
        for letter in letters:
            verdict = verdict_before(letter, topics, again=again)
            detail = why(verdict)
            if verdict == "would replay":
                try:
                    await _send(producer, topics, letter)
                    verdict = "replayed"
                except BrokerUnavailable:
                    raise
                except BrokerError as error:
                    verdict, detail, clean = "refused", str(error), False
            report(letter, verdict, detail)
    return clean


async def _send(producer: Producer, topics: TopicSet, letter: Letter) -> None:
    # By its key where it has one: a letter that came on the wrong partition then finds the right one.
    partition = letter.origin_partition if letter.key is None and letter.origin_partition >= 0 else None
    headers = [*letter.headers, (HEADER_REPLAYS, str(letter.replays + 1).encode())]
    await producer.send_and_wait(
        letter.origin_topic, letter.value, key=letter.key, partition=partition, headers=headers
    )
    marker = [(HEADER_REPLAY_OF, letter.address.encode())]
    await producer.send_and_wait(topics.dead_letter.name, b"", key=letter.key, headers=marker)
