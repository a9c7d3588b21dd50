"""Feature columns of interaction logs: one column of the file for each feature, named as the feature is.

A feature of width w > 1 has w columns, NAME.0 … NAME.w-1; in JSON Lines and Parquet it may be one column of lists
instead. Rows hold the features as they were at that interaction.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import InputError
from relaygr_stream.wire.features import NO_FEATURES, FeatureColumn, FeatureSchema, FeatureTables, Values
from relaygr_stream.workload.values import BadValue, is_number, short

Rows = npt.NDArray[np.int64]
_LARGEST: Final = {"int32": 2**31 - 1, "int64": 2**63 - 1, "float32": float(np.finfo(np.float32).max)}
_CODES: Final[dict[str, str]] = {"int32": "i", "int64": "q", "float32": "f"}


class FeatureReader:
    """Collects the features of a log's rows. Memory: 4 or 8 bytes a value."""

    def __init__(self, schema: FeatureSchema = NO_FEATURES) -> None:
        self.schema = schema
        self._arrays: list[array[Any]] = [array(_CODES[one.dtype]) for one in schema.columns]

    def wanted(self, present: Sequence[str], path: Path, lists: bool = False) -> list[str]:
        """The file's columns of all features, in the order of `parse`. Raises InputError, naming the missing one.

        lists: a column of lists may stand for several.
        """
        found: list[str] = []
        for one in self.schema.columns:
            names = [one.name] if lists and one.name in present else _names(one)
            missing = [name for name in names if name not in present]
            if missing:
                raise InputError(
                    f"{path}: no column `{missing[0]}` for the feature {one.name!r} ({one.of}, {one.dtype}, width "
                    f"{one.width}); there are {', '.join(f'`{name}`' for name in present[:40])}"
                )
            found += names
        return found

    def cells(self, record: Mapping[str, Any]) -> list[Any]:
        """A record's values, in the order of `parse`; None for one that is not there. Raises BadValue."""
        found: list[Any] = []
        for one in self.schema.columns:
            whole = record.get(one.name)
            if one.width > 1 and whole is not None:
                if not isinstance(whole, list) or len(whole) != one.width:
                    raise BadValue(f"`{one.name}` is no list of {one.width} numbers")
                found += whole
            else:
                found += [record.get(name) for name in _names(one)]
        return found

    def parse(self, cells: Sequence[Any]) -> list[list[float]]:
        """A row's numbers, a list for each column. cells: texts or numbers. Raises BadValue."""
        at, found = 0, []
        for one in self.schema.columns:
            found.append([_number(cell, one) for cell in cells[at : at + one.width]])
            at += one.width
        return found

    def add(self, numbers: list[list[float]]) -> None:
        """Add what `parse` returned."""
        for column, values in zip(self._arrays, numbers, strict=True):
            column.extend(values)

    def finish(self) -> dict[str, npt.NDArray[Any]]:
        """Name → (rows, width)."""
        columns = zip(self.schema.columns, self._arrays, strict=True)
        return {one.name: np.asarray(values, one.dtype).reshape(-1, one.width) for one, values in columns}


def request_columns(schema: FeatureSchema, features: Values, row: int, items: Rows, pairs: Rows) -> FeatureTables:
    """A request's other features: the user's in row `row`, the i-th candidate's in row items[i].

    Those of the i-th candidate × user are in row pairs[i], and 0 where that is negative.
    """
    values: dict[str, npt.ArrayLike] = {}
    for one in schema.columns:
        column = features[one.name]
        if one.of == "user":
            values[one.name] = column[row]
        elif one.of == "candidate":
            values[one.name] = column[items]
        elif one.of == "cross":
            values[one.name] = np.where(pairs[:, None] < 0, 0, column[pairs])
    tables = schema.pack(values, {"user": 1, "candidate": len(items)})
    return FeatureTables(schema.digest, tables["user"], tables["candidate"])


def _names(column: FeatureColumn) -> list[str]:
    return [column.name] if column.width == 1 else [f"{column.name}.{index}" for index in range(column.width)]


def _number(cell: Any, column: FeatureColumn) -> float:
    integer, largest = column.dtype != "float32", _LARGEST[column.dtype]
    number = cell
    if isinstance(cell, str) and is_number(cell):
        number = int(cell) if integer and cell.lstrip("+-").isdigit() else float(cell)
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        if integer and -largest - 1 <= number <= largest and number == int(number):
            return int(number)
        if not integer and -largest <= number <= largest:
            return float(number)
    shown = "missing" if cell is None else short(str(cell))
    raise BadValue(f"`{column.name}` is {shown}; expected {'an integer, ' if integer else ''}{column.dtype}")
