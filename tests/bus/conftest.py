"""Nobody dies here, so a process without a core for seconds is not taken for dead."""

from __future__ import annotations

import msgspec
import pytest

from relaygr_stream.settings.schema import Kafka

SESSION_MS = 6000


@pytest.fixture
def kafka_settings(kafka_settings: Kafka) -> Kafka:
    return msgspec.structs.replace(kafka_settings, session_timeout_ms=SESSION_MS)


@pytest.fixture
def embedded_settings(embedded_settings: Kafka) -> Kafka:
    return msgspec.structs.replace(embedded_settings, session_timeout_ms=SESSION_MS)
