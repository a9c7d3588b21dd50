"""A relay for each test of a whole rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.rollout import process, warming
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.routes import group_settings
from tests.unit.rollout.worlds import LANES, World


@pytest.fixture
async def world(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    """The parameter: by how much the lanes of the group "" have grown."""
    monkeypatch.setattr(process, "FIRST_S", 0.0)
    monkeypatch.setattr(warming, "SEEN_S", 0.0)
    kafka = msgspec.structs.replace(embedded_settings, partitions=LANES)
    await apply_topics(msgspec.structs.replace(kafka, partitions=LANES * getattr(request, "param", 1)))
    await apply_topics(group_settings(Settings(kafka=kafka), "next", LANES).kafka)
    async with Producer(kafka, client_id="groups") as producer:
        yield World(kafka, producer)
