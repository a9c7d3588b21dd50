from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from tests.unit.history.servers import RedisServer


@pytest.fixture(scope="session")
def _redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_server(_redis_server: RedisServer) -> RedisServer:
    """The tests' only one, empty, and running whatever the test before did to it."""
    if not _redis_server.runs:
        _redis_server.start()
    _redis_server.thaw()
    with Redis(port=_redis_server.port) as redis:
        redis.flushall()
    return _redis_server
