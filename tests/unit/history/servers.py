"""A real redis-server in a folder of its own, which a test may stop, freeze and start again."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import trustme

from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.settings.schema import History
from tests import needs
from tests.waiting import WITHIN_S, until_blocking


class RedisServer:
    """password, tls: what it asks of clients."""

    def __init__(self, folder: Path, *, password: str = "", tls: bool = False) -> None:
        needs.programs("redis-server")
        self.folder, self.password, self.tls = folder, password, tls
        (self.port,) = free_ports(1)  # one that stays its own while it is down
        self.ca = str(folder / "ca.pem")
        if tls:
            authority = trustme.CA()
            authority.cert_pem.write_to_path(self.ca)
            served = authority.issue_cert("localhost", "127.0.0.1")
            served.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        self._process: subprocess.Popen[bytes] | None = None

    def settings(self, **changes: Any) -> History:
        scheme, ca = ("rediss", self.ca) if self.tls else ("redis", "")
        given = {"store": f"{scheme}://localhost:{self.port}/0", "tls_ca": ca, "password": self.password, **changes}
        return History(**{"timeout_ms": 20_000.0, **given})

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        port = ["--port", str(self.port)]
        if self.tls:
            port = [
                "--port",
                "0",
                "--tls-port",
                str(self.port),
                "--tls-auth-clients",
                "no",
                "--tls-ca-cert-file",
                self.ca,
            ]
            port += [
                "--tls-cert-file",
                str(self.folder / "server.pem"),
                "--tls-key-file",
                str(self.folder / "server.pem"),
            ]
        secret = ["--requirepass", self.password] if self.password else []
        command = [
            "redis-server",
            *port,
            *secret,
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.folder),
            "--appendonly",
            "yes",
            "--appendfsync",  # by default, a write may wait for a sync: SIGKILL would then lose it
            "no",
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until_blocking(lambda: b"Ready to accept connections" in (self.folder / "log").read_bytes()[self._log_from :])

    _log_from = 0

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
            self._process.wait(WITHIN_S)
            self._process = None
            self._log_from = len((self.folder / "log").read_bytes())

    def freeze(self) -> None:
        """It accepts connections (the kernel does), and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
