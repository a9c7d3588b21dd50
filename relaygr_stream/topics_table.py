"""`relaygr topics show`: each topic's file beside what the cluster has, as text."""

from __future__ import annotations

from collections.abc import Sequence

from relaygr_stream.printable import printable
from relaygr_stream.topics import TopicRow

_COLUMNS = ("topic", "key", "from → to", "partitions", "replication", "retention", "max bytes", "cleanup")


def render_topics(rows: Sequence[TopicRow]) -> str:
    """One line per topic; where the cluster differs from the file, both are shown: file → cluster."""
    table = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def _cells(row: TopicRow) -> tuple[str, ...]:
    topic, found = row.topic, row.found
    way = f"{', '.join(topic.producers)} → {', '.join(topic.consumers)}"
    if found is None:
        return (topic.name, topic.key, way, "missing: `relaygr topics apply` creates it", "", "", "", "")
    return (
        topic.name,
        topic.key,
        way,
        _both(topic.partitions, found.partitions),
        _both(topic.replication, found.replication),
        _both(_seconds(topic.retention_ms), None if found.retention_ms is None else _seconds(found.retention_ms)),
        _both(topic.max_message_bytes, found.max_message_bytes),
        _both(topic.cleanup_policy, found.cleanup_policy),
    )


def _both(file: object, cluster: object | None) -> str:
    if cluster is None:
        return f"{file} (cluster: not told)"
    return str(file) if file == cluster else f"{file} → {printable(str(cluster))}"


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:g} s"
