"""What several real processes do together is tested on Apache Kafka alone, in make test-stack.

On the embedded broker make test has the parts of it (tests/unit, tests/bus), and the whole in the tests of
`embedded_settings`.
"""

from __future__ import annotations

import pytest

from tests.conftest import AnyBroker, Brokers


@pytest.fixture(scope="module", params=[pytest.param("kafka", marks=pytest.mark.kafka)])
def broker(brokers: Brokers) -> AnyBroker:
    """Apache Kafka."""
    return brokers.kafka()
