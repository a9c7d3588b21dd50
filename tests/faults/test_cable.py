"""The bad cable of the fault tests loses, delays and reorders what it says; else they would test nothing."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests import needs
from tests.faults.cable import MOST_RUNNING, SO_RCVBUFFORCE, Losses
from tests.faults.network import HERE, HINT, Network, network, permitted

pytestmark = pytest.mark.faults

PORT = 9
PACKETS = 2000
LOSS = 0.1
#: After the last packet was sent, so long without one means that no more will come.
SILENCE_S = 2.0
DELAY_S, JITTER_S = 0.03, 0.01
#: Standard deviations that chance may take a share of 2,000 packets from what was asked: one run in 10⁶ goes further.
CHANCE = 5


@pytest.fixture
def machines() -> Iterator[Network]:
    if not permitted():
        needs.without(HINT)
    with network("far") as found:
        yield found


def sent_across(machines: Network, packets: int = PACKETS) -> tuple[list[int], list[float]]:
    """Numbers of the packets that arrived, in the order of their arrival, and the seconds that each took."""
    numbers: list[int] = []
    took: list[float] = []
    address = (machines.address("far"), PORT)
    with machines.inside("far"):
        there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with there, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        there.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 4 << 20)  # beyond net.core.rmem_max: all packets fit
        there.bind(address)
        there.settimeout(SILENCE_S)

        def send() -> None:
            for number in range(packets):
                ours.sendto(f"{number} {time.monotonic()}".encode(), address)
                time.sleep(0.0002)

        sending = threading.Thread(target=send)
        sending.start()
        while True:
            all_sent = not sending.is_alive()
            try:
                number, sent = there.recv(100).split()
            except TimeoutError:
                if all_sent:
                    break
                continue
            numbers.append(int(number))
            took.append(time.monotonic() - float(sent))
    return numbers, took


def test_no_connection_is_silenced_for_longer_than_a_request() -> None:
    """Whatever is lost by chance: of a TCP connection, MOST_RUNNING frames at most until one has passed each way."""
    ends = b"\xc6\x12\x00\x01", b"\xc6\x12\x00\x02", b"\x23\x84", b"\x90\x1f"
    there = bytes(12) + b"\x08\x00\x45" + bytes(8) + b"\x06" + bytes(2) + ends[0] + ends[1] + ends[2] + ends[3]
    back = bytes(12) + b"\x08\x00\x45" + bytes(8) + b"\x06" + bytes(2) + ends[1] + ends[0] + ends[3] + ends[2]
    losses, running, worst = Losses(seed=3), 0, 0
    passed: set[int] = set()
    for number in range(20_000):
        direction = number % 2
        if losses.lost(back if direction else there, direction, 0.6):
            running, passed = running + 1, set()
            worst = max(worst, running)
        else:
            passed.add(direction)
            running = 0 if len(passed) == 2 else running
    assert worst == MOST_RUNNING
    datagram = there[:23] + b"\x11" + there[24:]
    lost = [losses.lost(datagram, 0, 0.6) for _ in range(2000)]
    assert any(all(lost[at : at + MOST_RUNNING + 1]) for at in range(len(lost))), "only connections are spared"


def known(machines: Network) -> None:
    """The far machine's address is asked for and answered: what waits for that may be dropped by the sender itself."""
    while not sent_across(machines, packets=1)[0]:
        pass


def test_as_new_everything_arrives_in_order(machines: Network) -> None:
    machines.splice("far")
    known(machines)
    numbers, _ = sent_across(machines)
    assert numbers == list(range(PACKETS))


def test_worn_it_loses_its_share(machines: Network) -> None:
    cable = machines.splice("far", seed=7)
    known(machines)
    cable.wear(loss=LOSS)
    numbers, _ = sent_across(machines)
    lost = 1 - len(numbers) / PACKETS
    assert abs(lost - LOSS) < CHANCE * (LOSS * (1 - LOSS) / PACKETS) ** 0.5, lost
    assert numbers == sorted(numbers), "without jitter nobody overtakes"
    cable.mend()
    numbers, _ = sent_across(machines)
    assert len(numbers) == PACKETS, "mended, nothing is lost"


def test_worn_it_delays_and_reorders(machines: Network) -> None:
    cable = machines.splice(HERE)
    known(machines)
    cable.wear(delay_s=DELAY_S, jitter_s=JITTER_S)
    numbers, took = sent_across(machines)
    assert sorted(numbers) == list(range(PACKETS)), "delay loses nothing"
    assert numbers != sorted(numbers), "jitter lets packets overtake each other"
    # From below only: a crowded machine delays more.
    assert min(took) >= DELAY_S - JITTER_S
    assert float(np.median(took)) >= DELAY_S - JITTER_S / 4


def test_connections_survive_it_whole(machines: Network) -> None:
    """Large writes come as frames that fit, with checksums, and TCP makes good what is lost."""
    cable = machines.splice("far")
    cable.wear(delay_s=0.002, jitter_s=0.001, loss=0.02)
    sent = os.urandom(2 << 20)
    with machines.inside("far"):
        listener = socket.create_server((machines.address("far"), PORT))
    received = bytearray()

    def take() -> None:
        connection, _ = listener.accept()
        with connection:
            while chunk := connection.recv(1 << 16):
                received.extend(chunk)

    taking = threading.Thread(target=take)
    taking.start()
    with socket.create_connection((machines.address("far"), PORT), timeout=60) as ours:
        ours.sendall(sent)
    taking.join(60)
    listener.close()
    assert hashlib.sha256(received).digest() == hashlib.sha256(sent).digest()


def test_spliced_it_can_still_be_pulled(machines: Network) -> None:
    machines.splice("far")
    known(machines)
    machines.cut("far")
    assert sent_across(machines, packets=10) == ([], [])
    machines.join("far")
    known(machines)
