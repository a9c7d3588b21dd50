"""Interaction logs in Parquet, read in batches through pyarrow (the extra `parquet`), imported only when needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from relaygr_stream.errors import InputError
from relaygr_stream.workload.columns import ColumnMap, Row
from relaygr_stream.workload.formats import named_columns, row_of
from relaygr_stream.workload.log_features import FeatureReader
from relaygr_stream.workload.logfile import BrokenLine, Progress, most_unpacked
from relaygr_stream.workload.unpacked import stored_bytes

BATCH_ROWS: Final = 65_536
#: Bytes of a value in memory, at least.
VALUE_BYTES: Final = 8


def read_parquet(
    path: Path, columns: ColumnMap | None, progress: Progress | None, features: FeatureReader
) -> Iterator[Row | BrokenLine]:
    """Rows of a Parquet file; a BrokenLine has the row's number, from 1. Raises InputError."""
    try:
        import pyarrow as arrow  # noqa: PLC0415 - optional
        from pyarrow import parquet  # noqa: PLC0415 - optional
    except ImportError as error:
        raise InputError(
            f"{path} is a Parquet file, and pyarrow, which reads them, is not installed: install "
            "this package with its extra `parquet`"
        ) from error
    size, line = path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
        names = named_columns(schema.names, columns, path)
        cells = features.wanted(schema.names, path, lists=True)
        wanted = list(dict.fromkeys([*names.values(), *cells]))
        texts = [name for name in wanted if _is_text(arrow, schema.field(name).type)]
        # Texts stay in their dictionary: a long one that all rows name is otherwise copied for each.
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            _refuse_bomb(path, file.metadata, set(wanted), stored_bytes(path.stat()))
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                values = {name: _plain(arrow, batch.column(name)) for name in wanted}
                for row in zip(*values.values(), strict=True):
                    line += 1
                    yield row_of(line, dict(zip(wanted, row, strict=True)), names, features)
                if progress is not None:
                    progress(size * line // total, size)
    except (arrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise InputError(f"{path}: cannot be read as Parquet after row {line}: {error}") from error


def _plain(arrow: Any, column: Any) -> list[Any]:
    """The column as Python values, with dates and timestamps as ISO 8601 text."""
    kind = column.type
    if arrow.types.is_date(kind):
        column, kind = column.cast(arrow.timestamp("ms")), arrow.timestamp("ms")
    if arrow.types.is_timestamp(kind):
        stamps = column.cast(arrow.timestamp("ms", tz=kind.tz), safe=False)
        return [None if value is None else value.isoformat() for value in stamps.to_pylist()]
    if arrow.types.is_dictionary(kind):
        known = column.dictionary.to_pylist()
        return [None if index is None else known[index] for index in column.indices.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def _is_text(arrow: Any, kind: Any) -> bool:
    return any(test(kind) for test in (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_binary))


def _refuse_bomb(path: Path, metadata: Any, wanted: set[str], size: int) -> None:
    """Raise InputError where the columns, by the file's own account, take more than most_unpacked allows."""
    unpacked = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.partition(".")[0] in wanted:
                unpacked += max(column.total_uncompressed_size, VALUE_BYTES * column.num_values)
    if unpacked > most_unpacked(size):
        raise InputError(
            f"{path}: its {size} bytes on the disk unpack to {unpacked >> 20} MiB, which no log does; write it as CSV "
            f"if it is one"
        )
