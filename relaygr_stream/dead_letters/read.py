"""Reading the dead-letter topic, without a group: looking changes nothing for anybody."""

from __future__ import annotations

from collections.abc import Sequence

from relaygr_stream.bus.records import Record
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.dead_letters.letter import Letter, letters_of
from relaygr_stream.errors import REASONS, InputError
from relaygr_stream.settings import Kafka
from relaygr_stream.topics import verify_topics


async def read_letters(kafka: Kafka) -> list[Letter]:
    """Every letter there is now, oldest first. Raises BrokerUnavailable, TopicError, ConfigError."""
    records: list[Record] = []
    row = next(row for row in await verify_topics(kafka) if row.topic.name == f"{kafka.prefix}dead-letter")
    assert row.found is not None  # verified
    async with TopicTail(kafka, row.topic.name, range(row.found.partitions), "earliest", records.extend):
        return letters_of(records)


def choose(letters: Sequence[Letter], *, addresses: Sequence[str], reason: str, origin: str) -> list[Letter]:
    """Those of the given addresses (none: all), reason and origin topic ("": any; without the prefix will do).

    Raises InputError for an address where no letter is, and for a reason that is neither known nor any letter's.
    """
    if reason and reason not in (known := {*REASONS, *(letter.reason for letter in letters)} - {""}):
        raise InputError(f"--reason {reason}: no such reason; there are {', '.join(sorted(known))}")
    by_address = {letter.address: letter for letter in letters}
    missing = [address for address in addresses if address not in by_address]
    if missing:
        raise InputError(
            f"no dead letter at {', '.join(missing)}; addresses are PARTITION:OFFSET, `relaygr dead-letters list` "
            f"prints them, and letters older than the topic's retention are gone"
        )
    chosen = [by_address[address] for address in dict.fromkeys(addresses)] if addresses else list(letters)
    return [
        letter
        for letter in chosen
        if (not reason or letter.reason == reason)
        and (not origin or origin in (letter.origin_topic, letter.origin_topic.rpartition(".")[2]))
    ]
