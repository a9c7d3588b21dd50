"""`relaygr topics show`: each topic's file beside the cluster's values, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from relaygr_stream.bus.topic_check import TopicRow
from relaygr_stream.telemetry.printable import listing, printable

_COLUMNS = (
    "topic",
    "key",
    "from → to",
    "partitions",
    "replication",
    "retention",
    "max bytes",
    "cleanup",
    "others that differ",
)

_SHOWN = ("retention.ms", "max.message.bytes", "cleanup.policy")


def render_topics(rows: Sequence[TopicRow]) -> Table:
    """One row per topic; a difference is shown as file → cluster."""
    table = listing(_COLUMNS)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: TopicRow) -> tuple[str, ...]:
    topic, found = row.topic, row.found
    way = f"{', '.join(topic.producers)} → {', '.join(topic.consumers)}"
    if found is None:
        why = "hidden, for lack of the ACL DESCRIBE" if row.hidden else "missing: `relaygr topics apply` creates it"
        return (topic.name, topic.key, way, why, "", "", "", "", "")
    configs = found.configs
    return (
        topic.name,
        topic.key,
        way,
        _both(topic.partitions, found.partitions),
        _both(topic.replication, found.replication),
        _both(_seconds(str(topic.retention_ms)), _seconds(configs.get("retention.ms"))),
        _both(str(topic.max_message_bytes), configs.get("max.message.bytes")),
        _both(topic.cleanup_policy, configs.get("cleanup.policy")),
        ", ".join(
            f"{name} {_both(value, configs.get(name))}"
            for name, value in topic.configs.items()
            if name not in _SHOWN and configs.get(name, value) != value
        ),
    )


def _both(file: object, cluster: object | None) -> str:
    if cluster is None:
        return f"{file} (cluster: unknown)"
    return str(file) if file == cluster else f"{file} → {printable(str(cluster))}"


def _seconds(milliseconds: str | None) -> str | None:
    return None if milliseconds is None else f"{int(milliseconds) / 1000:g} s"
