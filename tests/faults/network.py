"""Machines of their own on one machine: network namespaces, each with an address, on one switch whose cables can be
pulled, and replaced by bad ones (cable.py).

A pulled cable drops what is sent, without a reset or an unreachable address, as a machine that lost its network does.
Needs root and iproute2. Everything is removed when the block ends; processes started inside must have ended by then.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.faults.cable import Cable, plain_frames

#: The block that is set apart for measuring between networks (RFC 2544), which nobody routes: 512 networks of 254.
BLOCK: Final = ("198.18", "198.19")
CLONE_NEWNET: Final = 0x40000000  # <linux/sched.h>
HERE: Final = "here"
#: Why a test was skipped, where not `permitted`.
HINT: Final = (
    "run as root with iproute2 where network namespaces may be made (`ip netns add`), or in a privileged container"
)


class Network:
    """A switch, machines by name, and the namespace of this process as one more machine, HERE."""

    def __init__(self, machines: Sequence[str]) -> None:
        self._run: Final = f"rg{uuid.uuid4().hex[:6]}"
        self._machines: Final = {name: number for number, name in enumerate((HERE, *machines), start=1)}
        # Another one, by another run of the tests, would take our packets if it were the same.
        self._subnet: Final = f"{random.choice(BLOCK)}.{random.randrange(256)}"
        self._spliced: Final[dict[str, Cable]] = {}

    def address(self, machine: str) -> str:
        """IPv4."""
        return f"{self._subnet}.{self._machines[machine]}"

    def cut(self, machine: str) -> None:
        """Pull the machine's cable."""
        self._ip("-n", self._run, "link", "set", self._plug(machine), "nomaster")

    def join(self, machine: str) -> None:
        """Plug it in again."""
        self._ip("-n", self._run, "link", "set", self._plug(machine), "master", "switch")

    def splice(self, machine: str, seed: int = 1) -> Cable:
        """Replace the machine's cable, once, by one that can wear; nothing passes meanwhile.

        Between the machine's port and the switch comes another pair of interfaces, and a process carries the frames
        from pair to pair.
        """
        self.cut(machine)
        port, far, plug = self._port(machine), f"far{self._machines[machine]}", f"plug{self._machines[machine]}"
        self._ip("-n", self._run, "link", "add", far, "type", "veth", "peer", "name", plug)
        for end in (far, plug):
            self._ip("-n", self._run, "link", "set", end, "up")
        with self.inside(machine):
            plain_frames(self._card)
        with _entered(Path("/run/netns", self._run)):
            plain_frames(plug)
            self._spliced[machine] = Cable(port, far, seed)
        self.join(machine)
        return self._spliced[machine]

    @contextmanager
    def inside(self, machine: str) -> Iterator[None]:
        """Processes and sockets that this thread begins in the block belong to the machine. Not over an await."""
        ours = Path("/proc/thread-self/ns/net")
        with _entered(ours if machine == HERE else Path("/run/netns", self._namespace(machine))):
            yield

    def build(self) -> None:
        """Make the switch and the machines."""
        self._ip("netns", "add", self._run)
        self._ip("-n", self._run, "link", "add", "switch", "type", "bridge")
        self._ip("-n", self._run, "link", "set", "switch", "up")
        for machine in self._machines:
            place: tuple[str, ...] = ()
            if machine != HERE:
                namespace = self._namespace(machine)
                self._ip("netns", "add", namespace)
                self._ip("-n", namespace, "link", "set", "lo", "up")
                place = ("-n", namespace)
            card, port = self._card, self._port(machine)
            self._ip(*place, "link", "add", card, "type", "veth", "peer", "name", port, "netns", self._run)
            self._ip(*place, "address", "add", f"{self.address(machine)}/24", "dev", card)
            self._ip(*place, "link", "set", card, "up")
            self._ip("-n", self._run, "link", "set", port, "up")
            self.join(machine)

    def remove(self) -> None:
        """Remove what `build` and `splice` made, as far as they came."""
        for cable in self._spliced.values():
            cable.remove()
        subprocess.run(["ip", "link", "del", self._card], check=False, capture_output=True)
        for namespace in (*(self._namespace(machine) for machine in self._machines if machine != HERE), self._run):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

    @property
    def _card(self) -> str:
        return f"{self._run}e"

    def _namespace(self, machine: str) -> str:
        return f"{self._run}-{machine}"

    def _port(self, machine: str) -> str:
        return f"port{self._machines[machine]}"

    def _plug(self, machine: str) -> str:
        """What is in the switch at the end of its cable."""
        return f"plug{self._machines[machine]}" if machine in self._spliced else self._port(machine)

    @staticmethod
    def _ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"


@contextmanager
def network(*machines: str) -> Iterator[Network]:
    """The machines for the duration of the block."""
    found = Network(machines)
    try:
        found.build()
        yield found
    finally:
        found.remove()


@contextmanager
def _entered(namespace: Path) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as home:
        with namespace.open("rb") as there:
            _check(libc.setns(there.fileno(), CLONE_NEWNET))
        try:
            yield
        finally:
            _check(libc.setns(home.fileno(), CLONE_NEWNET))


def permitted() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"rg{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return made


def _check(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
