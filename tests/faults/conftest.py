"""The cluster of three, started at its first use and kept for the session; each test finds it whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests import needs
from tests.faults.cluster import ThreeBrokers, three_brokers


@pytest.fixture(scope="session")
def _three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeBrokers]:
    needs.kafka_home()
    with asyncio.Runner() as runner:
        context = three_brokers(tmp_path_factory.mktemp("three"))
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@pytest_asyncio.fixture
async def cluster(_three: ThreeBrokers) -> AsyncIterator[ThreeBrokers]:
    """Three brokers, all serving, every copy in sync."""
    await _three.heal()
    yield _three
