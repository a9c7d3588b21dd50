"""Where the package keeps aiokafka, and aiokafka its parts, for tests that break them: private names, each once."""

from __future__ import annotations

import gc
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.renewed import Renewed
from relaygr_stream.bus.tail import TopicTail


def unexpected(*_: object, **__: object) -> Any:
    """Stands for a call of aiokafka's own."""
    raise KeyError("which aiokafka does not expect")


def renewed(part: Producer | TopicTail | LogEnds | LaneConsumer) -> Renewed:
    """What makes the part's client anew; `client` is the present one."""
    return part._reader._renewed if isinstance(part, LaneConsumer) else part._renewed


def member(consumer: LaneConsumer) -> Any:
    """The aiokafka consumer that takes part in the group, and reads nothing."""
    return consumer._membership._consumer


def fail_fetcher(consumer: Any) -> None:
    """The consumer's fetcher ends at its next turn."""
    consumer._fetcher._get_actions_per_node = unexpected


def fail_sender(producer: Any) -> None:
    """The producer's sender ends at its next turn."""
    producer._message_accumulator.drain_by_nodes = unexpected


def fail_heartbeat(consumer: Any) -> None:
    """The next heartbeat raises what nobody expects."""
    consumer._coordinator._do_heartbeat = unexpected


def cluster(consumer: Any) -> Any:
    """What the consumer knows of the cluster."""
    return consumer._client.cluster


def identity(consumer: Any) -> tuple[str, str]:
    """A member's group, and its id there."""
    coordinator = consumer._coordinator
    return coordinator.group_id, coordinator.member_id


def closed(client: Any) -> bool:
    """Whether an aiokafka client was closed."""
    return bool(client._closed)


def open_consumers() -> list[AIOKafkaConsumer]:
    """All of this process."""
    return [each for each in gc.get_objects() if type(each) is AIOKafkaConsumer and not closed(each)]


def reader(client_id: str) -> Any:
    """The consumer without a group that is open under that client id."""
    (one,) = (each for each in open_consumers() if (each._client._client_id, each._group_id) == (client_id, None))
    return one


def producer(client_id: str) -> Any:
    """The producer that is open under that client id."""
    (one,) = (
        each
        for each in gc.get_objects()
        if type(each) is AIOKafkaProducer and not closed(each) and each.client._client_id == client_id
    )
    return one


def states_speed(consumer: LaneConsumer) -> bool:
    """Whether so much was read that the member states its speed."""
    return consumer._membership._assignor.speed > 0
