"""A cable that loses, delays and reorders frames: a process that carries them between two network interfaces.

For kernels without netem. `Cable` is the owner's hold on the process, which is this file run as a script: it imports
nothing of this package, starts in milliseconds, and ends with its owner (end of its standard input). Knows nothing of
machines and switches (network.py does), nor of what the frames carry.

usage: cable.py INTERFACE INTERFACE SEED; a line "DELAY_S JITTER_S LOSS" is answered by "CARRIED LOST", frames so far
"""

from __future__ import annotations

import array
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

ETH_P_ALL: Final = 3  # <linux/if_ether.h>
IPPROTO_TCP: Final = 6
SOL_PACKET, PACKET_IGNORE_OUTGOING = 263, 23  # <linux/socket.h>, <linux/if_packet.h>
SO_RCVBUFFORCE: Final = 33  # <asm-generic/socket.h>
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17  # <linux/sockios.h>, <linux/ethtool.h>
#: Frames wait here while this process does not get a core: a second at 100 Mbit/s is 12 MB.
BUFFER_BYTES: Final = 16 << 20
FRAME_BYTES: Final = 65536
#: TCP waits twice as long after each loss, from 0.2 s on. Five losses running, as happen now and then, silence a
#: connection for six seconds: longer than any request lasts, whatever runs above TCP.
MOST_RUNNING: Final = 3
#: Taken from one end before the other, and those that are due, have their turn.
BATCH: Final = 64


class Cable:
    """As good as new at first. Made in the network namespace of both interfaces, which nothing else may bridge."""

    def __init__(self, near: str, far: str, seed: int) -> None:
        command = [sys.executable, "-I", "-S", __file__, near, far, str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.mend()

    def wear(self, *, delay_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0) -> None:
        """From now on, in each direction: every frame takes `delay_s` longer, give or take up to `jitter_s` (so frames
        overtake each other), and a share `loss` of them never arrives, MOST_RUNNING of a TCP connection running."""
        self._tell(f"{delay_s} {jitter_s} {loss}")

    def mend(self) -> None:
        """From now on every frame arrives at once."""
        self.wear()

    def remove(self) -> None:
        """End the process: nothing passes any more."""
        self._process.communicate(timeout=10)

    def _tell(self, wear: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(wear + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline(), f"the cable's process ended with {self._process.wait()}"


def plain_frames(interface: str) -> None:
    """Have the kernel cut what it sends here into frames of the MTU with checksums, as on a wire: between two of its
    own interfaces it hands over up to 64 KB whole, without checksums, which no packet socket can carry further.

    Without checksum offload there is no segmentation offload either.
    """
    value = array.array("B", struct.pack("II", ETHTOOL_STXCSUM, 0))
    address, _ = value.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP", interface.encode(), address))


@dataclass
class _Wear:
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


class Losses:
    """Which frames are lost: by chance, at most MOST_RUNNING of a TCP connection until one has passed each way."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._running: dict[tuple[bytes, ...], tuple[int, set[int]]] = {}  # losses, directions that passed since

    def lost(self, frame: bytes, direction: int, share: float) -> bool:
        by_chance = self._chance.random() < share
        if frame[12:14] != b"\x08\x00" or frame[23] != IPPROTO_TCP:
            return by_chance
        ports = 14 + 4 * (frame[14] & 15)
        ends = (frame[26:30] + frame[ports : ports + 2], frame[30:34] + frame[ports + 2 : ports + 4])
        connection = tuple(sorted(ends))
        losses, passed = self._running.get(connection, (0, set[int]()))
        if by_chance and losses < MOST_RUNNING:
            self._running[connection] = losses + 1, set()
            return True
        passed.add(direction)
        if len(passed) == 2:
            self._running.pop(connection, None)
        return False


def _carry(near: str, far: str, seed: int) -> None:
    ends = (_end(near), _end(far))
    chance, losses, wear = random.Random(seed), Losses(seed), _Wear()
    under_way: list[tuple[float, int, socket.socket, bytes]] = []  # heap: due by the clock, number, towards, frame
    number = lost = 0
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([sys.stdin, *ends], [], [], patience)
        if sys.stdin in readable:
            if not (line := os.read(0, 4096)):
                return
            wear = _Wear(*map(float, line.split()))
            os.write(1, f"{number - lost} {lost}\n".encode())
        for direction, (source, sink) in enumerate((ends, ends[::-1])):
            for frame in _received(source) if source in readable else ():
                number += 1
                if losses.lost(frame, direction, wear.loss):
                    lost += 1
                    continue
                due = time.monotonic() + wear.delay_s + chance.uniform(-wear.jitter_s, wear.jitter_s)
                heapq.heappush(under_way, (due, number, sink, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, sink, frame = heapq.heappop(under_way)
            sink.send(frame)


def _end(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # hears nothing until it is bound
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.bind((interface, ETH_P_ALL))
    return end


def _received(end: socket.socket) -> list[bytes]:
    frames: list[bytes] = []
    try:
        while len(frames) < BATCH:
            frames.append(end.recv(FRAME_BYTES, socket.MSG_DONTWAIT))
    except BlockingIOError:
        pass
    return frames


if __name__ == "__main__":
    _carry(sys.argv[1], sys.argv[2], int(sys.argv[3]))
