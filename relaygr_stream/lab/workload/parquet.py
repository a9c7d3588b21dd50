"""Interaction logs in Parquet, read in batches through pyarrow (the extra `parquet`), imported only when needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from relaygr_stream.errors import InputError
from relaygr_stream.lab.workload.columns import ColumnMap, Row
from relaygr_stream.lab.workload.formats import named_columns, row_of
from relaygr_stream.lab.workload.log_features import FeatureReader
from relaygr_stream.lab.workload.logfile import BrokenLine, Progress

BATCH_ROWS: Final = 65_536


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
    size = path.stat().st_size
    line = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = named_columns(file.schema_arrow.names, columns, path)
            total = max(1, file.metadata.num_rows)
            cells = features.wanted(file.schema_arrow.names, path, lists=True)
            wanted = list(dict.fromkeys([*names.values(), *cells]))
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                values = {name: _plain(arrow, batch.column(name)) for name in wanted}
                for row in zip(*values.values(), strict=True):
                    line += 1
                    yield row_of(line, dict(zip(wanted, row, strict=True)), names, features)
                if progress is not None:
                    progress(size * line // total, size)
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: cannot be read as Parquet after row {line}: {error}") from error


def _plain(arrow: Any, column: Any) -> list[Any]:
    """The column as Python values, with dates and timestamps as ISO 8601 text."""
    kind = column.type
    if arrow.types.is_date(kind):
        column, kind = column.cast(arrow.timestamp("ms")), arrow.timestamp("ms")
    if arrow.types.is_timestamp(kind):
        stamps = column.cast(arrow.timestamp("ms", tz=kind.tz), safe=False)
        return [None if value is None else value.isoformat() for value in stamps.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values
