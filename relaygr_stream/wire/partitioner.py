"""MurmurHash2 with the seed of Kafka's Java client: the partition of a key.

The same function as aiokafka's, which reads byte by byte. Reading word by word takes a third of the time, and the
trigger checks the lane of every event.
"""

from __future__ import annotations

import struct
from typing import Final

SEED: Final = 0x9747B28C
FACTOR: Final = 0x5BD1E995
MASK: Final = 0xFFFFFFFF
WORD: Final = struct.Struct("<I")


def murmur2(data: bytes) -> int:
    """The hash, as an unsigned 32-bit number."""
    length = len(data)
    words = length & ~3
    value = SEED ^ length
    for (word,) in WORD.iter_unpack(data[:words]):
        mixed = (word * FACTOR) & MASK
        value = (value * FACTOR ^ (mixed ^ mixed >> 24) * FACTOR) & MASK
    if words != length:
        value = ((value ^ int.from_bytes(data[words:], "little")) * FACTOR) & MASK
    value = ((value ^ value >> 13) * FACTOR) & MASK
    return value ^ value >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition, of `partitions`, that Kafka's Java client gives a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
