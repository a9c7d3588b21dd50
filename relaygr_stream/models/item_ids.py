"""The item ids that a checkpoint lists, items.json, by row of its item table; and ids of requests as these rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import ConfigError
from relaygr_stream.models.api import Tokens
from relaygr_stream.settings.inputs import read_text
from relaygr_stream.wire.behaviours import MAX_ITEM

#: The file that a training run of examples/ leaves beside its checkpoint: a list of item ids, one a row.
ITEMS_FILE: Final = "items.json"
#: Its bound: 20 million ids of ten characters.
MAX_ITEMS_BYTES: Final = 1 << 28

Ids = npt.NDArray[np.int64]


def listed_items(folder: Path) -> list[str] | None:
    """The ids of ITEMS_FILE in `folder`; None: there is none. Raises ConfigError for one that is no list of ids."""
    file = folder / ITEMS_FILE
    if not file.exists():
        return None
    try:
        return list(map(str, msgspec.json.decode(read_text(file, MAX_ITEMS_BYTES), type=list[str | int])))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as a list of item ids: {error}") from error


class ItemIds:
    """Ids of requests → rows: a listed id has its row; any other one, −1 − id, which no table has, and which is hashed
    to the rows of unknown items.

    Memory: 16 bytes an id. digest: of all ids in their order.
    """

    digest: Final[str]

    def __init__(self, ids: Ids) -> None:
        self.digest = hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).hexdigest()
        self._rows = np.argsort(ids, kind="stable")
        self._sorted = ids[self._rows]

    @classmethod
    def read(cls, folder: Path, rows: int) -> ItemIds:
        """Those of ITEMS_FILE, which must list one integer within 0…2⁶³ − 1 for each of `rows`. Raises ConfigError."""
        texts = listed_items(folder)
        if texts is None or len(texts) != rows:
            found = "no such file" if texts is None else f"{len(texts)} ids"
            raise ConfigError(f"{folder / ITEMS_FILE}: `listed_items` needs an id for each of {rows} rows; {found}")
        for row, text in enumerate(texts):
            if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ITEM)) and int(text) <= MAX_ITEM):
                raise ConfigError(f"{folder / ITEMS_FILE}: row {row} is {text[:40]!r}, no integer within 0…{MAX_ITEM}")
        made = cls(np.array(list(map(int, texts)), np.int64))
        if len(twice := np.flatnonzero(np.diff(made._sorted) == 0)):
            raise ConfigError(f"{folder / ITEMS_FILE}: the id {made._sorted[twice[0]]} stands there twice")
        return made

    def rows(self, ids: Ids) -> Ids:
        """The rows of ids (n,)."""
        places = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        return np.where(self._sorted[places] == ids, self._rows[places], -1 - ids)

    def tokens(self, tokens: Tokens) -> Tokens:
        """The same tokens with rows in place of ids."""
        array = tokens.array.copy()
        array[0, tokens.context :] = self.rows(array[0, tokens.context :])
        return Tokens(array)
