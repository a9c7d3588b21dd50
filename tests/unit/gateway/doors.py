"""A gateway in this process, on real topics and a real port, and a plain HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from relaygr_stream.gateway.service import run_gateway
from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Client, Gateway, History, Kafka, Settings, Telemetry
from relaygr_stream.telemetry.process import ProcessContext, process
from tests.waiting import until

TOKEN, OTHER = "a-token-of-the-shop", "a-token-of-the-library"
TOKENS = f"shop:{TOKEN} library:{OTHER}"
HISTORY = {"items": [5, 6, 7], "actions": [1, 0, 1], "times": [100, 200, 300]}
ANNOUNCE = {"user_id": "u", "history": HISTORY, "candidates": 3}
RANK = {"user_id": "u", "history": HISTORY, "candidates": [11, 30, 20]}


class Reply:
    """An answer: status, headers with small names, body."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        self.body = answer.read()

    @property
    def value(self) -> Any:
        kind = self.headers["content-type"]
        return msgspec.msgpack.decode(self.body) if kind == "application/msgpack" else json.loads(self.body)


class OpenDoor:
    """A gateway that serves."""

    def __init__(self, context: ProcessContext, port: int, task: asyncio.Task[None]) -> None:
        self.context = context
        self.port = port
        self.task = task
        self.trust: ssl.SSLContext | None = None  # whom a client of HTTPS trusts; None: HTTP

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request on a connection of its own. body: a map, as JSON; bytes as they are. token_: "" for none."""

        def asked() -> Reply:
            address: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "timeout": 30}
            connection = (
                http.client.HTTPSConnection(**address, context=self.trust)
                if self.trust
                else http.client.HTTPConnection(**address)
            )
            token = headers.pop("token_", TOKEN)
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            if token:
                sent["authorization"] = f"Bearer {token}"
            data = json.dumps(body) if isinstance(body, dict) else body
            try:
                connection.request(method, path, data, sent)
                return Reply(connection.getresponse())
            finally:
                connection.close()

        return await asyncio.to_thread(asked)

    def count(self, name: str, **labels: str) -> float:
        """A metric of the gateway."""
        return self.context.registry.get_sample_value(f"relaygr_gateway_{name}", labels) or 0.0


@asynccontextmanager
async def door_on(
    kafka: Kafka,
    client: Client | None = None,
    history: History | None = None,
    scenarios: tuple[Scenario, ...] = (),
    **gateway: Any,
) -> AsyncIterator[OpenDoor]:
    """A gateway that is ready; stopped in order at the end."""
    (port,) = free_ports(1)
    settings = Settings(
        kafka=kafka,
        client=client or Client(timeout_ms=20_000),  # on a crowded machine a second may pass before an answer
        history=history or History(),
        gateway=msgspec.structs.replace(Gateway(port=port, tokens=TOKENS), **gateway),
        telemetry=Telemetry(log_level="warning"),
        scenarios=scenarios,
    )
    async with process(settings, "gateway", registry=CollectorRegistry()) as context:
        task = asyncio.create_task(run_gateway(context))
        try:
            await until(lambda: task.done() or context.why_not_ready() is None, "the gateway is ready")
            if task.done():
                task.result()
            yield OpenDoor(context, port, task)
        finally:
            context.stop.set()
            await task
