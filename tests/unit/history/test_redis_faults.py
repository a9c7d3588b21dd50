"""A real redis-server that is slow, away, restarted, wrong, or asks for TLS and a password."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import pytest
import trustme
from prometheus_client import CollectorRegistry

from relaygr_stream.errors import ConfigError, HistoryMismatch, HistoryUnavailable
from relaygr_stream.history.redis_store import RedisStore
from relaygr_stream.settings.schema import History, Kafka
from relaygr_stream.worker.histories import Histories, HistoryMetrics
from tests.unit.history.behaviours import history
from tests.unit.history.servers import RedisServer
from tests.unit.worker import services
from tests.unit.worker.test_service_histories import rank, signal
from tests.waiting import WITHIN_S, until


def kept_by(store: RedisStore, server: RedisServer, **changes: Any) -> Histories:
    return Histories(store, server.settings(**changes), HistoryMetrics(CollectorRegistry()))


async def test_tls_and_a_password(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password="a secret of sixteen", tls=True) as server:
        store = RedisStore(server.settings())
        written = await store.append("u", "", history(100))
        assert await store.reference("u") == written
        await store.close()
        for wrong, said in (
            ({"password": "another secret"}, "WRONGPASS|invalid username-password"),
            ({"password": ""}, "NOAUTH|Authentication required"),
            ({"tls_ca": ""}, "CERTIFICATE_VERIFY_FAILED|certificate verify failed"),
            ({"store": f"rediss://127.0.0.2:{server.port}/0"}, "."),
            ({"store": f"redis://localhost:{server.port}/0"}, "."),
        ):
            refused = RedisStore(server.settings(**wrong))
            with pytest.raises(HistoryUnavailable, match=said) as error:
                await refused.reference("u")
            assert "secret" not in str(error.value)
            await refused.close()
        with pytest.raises(ConfigError, match=r"`tls\.ca` = '/no/such/file': no such file"):
            RedisStore(server.settings(tls_ca="/no/such/file"))


async def test_one_context_serves_all_connections_and_trusts_no_other_authority_than_the_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    with RedisServer(tmp_path, tls=True) as server:
        monkeypatch.setenv("SSL_CERT_FILE", server.ca)  # the system's authorities
        stores = [RedisStore(server.settings(tls_ca=ca)) for ca in (str(other), "")]
        monkeypatch.setattr(ssl, "create_default_context", None)  # which reads the system's, in 40 ms
        with pytest.raises(HistoryUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await stores[0].reference("u")
        assert await asyncio.gather(*(stores[1].reference(f"u{number}") for number in range(8))) == [None] * 8
        for store in stores:
            await store.close()


@pytest.mark.parametrize(
    "end", ["/0?ssl_cert_reqs=none", "/0?ssl_check_hostname=false", "?password=geheim", "/fleet", "#0"]
)
def test_a_url_with_options_or_with_a_name_of_a_database_is_refused(end: str) -> None:
    with pytest.raises(ConfigError, match=r"history\.store = rediss://h:1.*\[tls\] are settings") as error:
        RedisStore(History(store=f"rediss://h:1{end}"))
    assert "geheim" not in str(error.value)


async def test_a_restarted_server_has_what_was_written_and_readers_go_on(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.settings())
    histories = kept_by(store, redis_server, max_retries=1)
    written = await store.append("u", "", history(100))
    await store.append("v", "", history(50))
    await histories.find("v", "", await reference(store, "v"), monotonic() + 20)
    redis_server.stop()
    with pytest.raises(HistoryUnavailable, match="ConnectionError"):
        await histories.find("u", "", written, monotonic() + 20)
    redis_server.start()
    assert await histories.find("u", "", written, monotonic() + 20) == history(100)
    assert (await store.append("u", "", history(110).slice(100, 110))).length == 110
    await store.close()


async def test_a_read_is_tried_again_until_the_server_is_back(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "relaygr_stream.worker.histories.RETRY_S", 0.1
    )  # with its doublings, tries for more than a minute
    store = RedisStore(redis_server.settings())
    registry = CollectorRegistry()
    histories = Histories(store, redis_server.settings(max_retries=10), HistoryMetrics(registry))
    written = await store.append("u", "", history(100))
    redis_server.stop()
    waiting = asyncio.create_task(histories.find("u", "", written, monotonic() + 60))
    failed = partial(registry.get_sample_value, "relaygr_history_reads_total", {"result": "unavailable"})
    await until(failed, "a read has failed")
    redis_server.start()
    assert await waiting == history(100)
    await store.close()


async def test_a_frozen_server_costs_timeouts_and_its_late_answers_reach_nobody(redis_server: RedisServer) -> None:
    """Cancelled reads must not leave answers in connections that later reads take for their own."""
    patient = RedisStore(redis_server.settings(timeout_ms=20_000.0, max_reads=4))
    users = {f"u{number}": history(40 + number, number) for number in range(12)}
    references = {user: await patient.replace(user, "", whole) for user, whole in users.items()}
    store = RedisStore(redis_server.settings(timeout_ms=150.0, max_reads=4))
    histories = kept_by(store, redis_server, timeout_ms=150.0, max_retries=0, max_reads=4)
    redis_server.freeze()
    reads = (histories.find(user, "", references[user], monotonic() + 0.4) for user in users)
    ended = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(error) for error in ended} <= {HistoryUnavailable, TimeoutError}
    waiting = [asyncio.create_task(patient.read(user, "", 1, 0, 99)) for user in users]
    await asyncio.sleep(0.1)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    redis_server.thaw()
    for user, whole in users.items():
        assert await patient.read(user, "", 1, 0, 99) == whole
        assert await kept_by(patient, redis_server).find(user, "", references[user], monotonic() + 20) == whole
    await store.close()
    await patient.close()


async def reference(store: RedisStore, user: str) -> Any:
    found = await store.reference(user)
    assert found is not None
    return found


def command(server: RedisServer, *arguments: str | bytes) -> None:
    subprocess.run(["redis-cli", "-p", str(server.port), *arguments], check=True, capture_output=True, timeout=WITHIN_S)


@pytest.mark.parametrize(
    ("done", "error"),
    [
        (("DEL", "behaviours"), HistoryMismatch),  # as an eviction does
        (("SETRANGE", "behaviours", "13", "another item"), HistoryMismatch),
        (("SET", "behaviours", "short"), HistoryMismatch),
        (("DEL", "head"), HistoryMismatch),
        (("SET", "head", "of another program"), HistoryUnavailable),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value.__name__,
)
async def test_what_is_wrong_in_redis_is_never_taken_for_the_history(
    redis_server: RedisServer, done: tuple[str, ...], error: type[Exception]
) -> None:
    store = RedisStore(redis_server.settings())
    written = await store.append("u", "", history(100))
    verb, key, *rest = done
    await asyncio.to_thread(command, redis_server, verb, f"relaygr:history:{{u}}:{key}", *rest)
    with pytest.raises(error):
        await kept_by(store, redis_server, max_retries=0).find("u", "", written, monotonic() + 20)
    await store.close()


async def test_a_key_of_another_type_is_an_error_that_names_no_user(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.settings())
    await asyncio.to_thread(command, redis_server, "LPUSH", "relaygr:history:{u-secret}:head", "x")
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.reference("u-secret"),
        lambda: store.read("u-secret", "", 0, 0, 9),
        lambda: store.append("u-secret", "", history(2)),
    ]
    for call in calls:
        with pytest.raises(HistoryUnavailable, match="WRONGTYPE") as error:
            await call()
        assert "u-secret" not in str(error.value)
    await store.close()


async def test_a_worker_goes_on_while_redis_is_away_and_recovers(
    embedded_settings: Kafka, redis_server: RedisServer
) -> None:
    settings = services.worker_settings(embedded_settings)
    settings = msgspec.structs.replace(settings, history=redis_server.settings(max_retries=0))
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(services.Peer(embedded_settings))
        worker = await stack.enter_async_context(services.worker_on(settings))
        store = RedisStore(redis_server.settings())
        stack.push_async_callback(store.close)
        known = await store.replace("known", "", services.history("known", 60))
        other = await store.replace("other", "", services.history("other", 60))
        await signal(peer, "r", "known", known)
        await until(lambda: worker.total("history_reads") == 1)
        redis_server.stop()
        kept = await peer.reply(await rank(peer, "r", "known", known))
        assert (kept.status, kept.outcome in ("hbm", "joined")) == ("ok", True)
        failed = await peer.reply(await rank(peer, "r2", "other", other))
        assert failed.status == "failed"
        assert "Redis: ConnectionError" in failed.detail
        carried = await peer.reply(await peer.rank("r3", "other", 60))
        assert carried.status == "ok"
        assert worker.ready
        redis_server.start()
        again = await peer.reply(await rank(peer, "r4", "other", other))
        assert again.status == "ok"
        np.testing.assert_allclose(again.matrix(), carried.matrix(), rtol=1e-5, atol=1e-6)
        await until(lambda: worker.worker.requests.held_bytes == 0, "released")
