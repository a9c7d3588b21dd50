"""Compares DlrmHSTU with arrays that the reference computed: each intermediate, K/V, and what is served.

The file is an npz with `meta/config` in JSON, inputs `in/REQUEST/…`, outputs `out/MODE/REQUEST/ARRAY` or
`out/REQUEST/ARRAY`, and weights `w/NAME`, or a formula of them in the config. A mode says which N and which last row of
the time table the reference used. Every array must be within LIMIT of its largest value, or of 1.

A request's rows go through the layers one by one, over a region of one layer, so that each layer's outputs and K/V
show. Then the whole model serves the request by `prefill` and `score`. In the mode `incremental` it is the model that
grows prefixes: each request is prefilled in chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.errors import InputError, ModelError
from relaygr_stream.models.api import ROWS, USER_ACTION, ScoreInput, Tokens
from relaygr_stream.models.dlrm.config import CANDIDATE_CATEGORY, CANDIDATE_TIME
from relaygr_stream.models.dlrm.embedding import StatedQuery
from relaygr_stream.models.dlrm.model import DlrmHSTU
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.importer.dlrm_hstu import ACTION_WEIGHTS, TABLES, Choices, model_of
from relaygr_stream.models.importer.formula import TABLES_OF, FormulaWeights
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.reference_arrays import ReferenceArrays
from relaygr_stream.models.stu import RankingRows
from relaygr_stream.settings import Kernels
from relaygr_stream.wire.features import FeatureSchema, Table

#: Largest deviation that conforms, over the larger of 1 and an array's largest value.
LIMIT: Final = 1e-5
CONFIG: Final = "meta/config"
#: Modes in which the reference computed a batch with one N for all, `fixed_N` of the config.
FIXED: Final = ("fixed", "fixed_triton", "incremental")
INCREMENTAL: Final = "incremental"
#: What stands before arrays with the time rows of the Triton kernel, in files without modes.
TRITON: Final = "triton_"
#: Tokens of a prefix that the incremental model prefills in one call.
CHUNK: Final = 17
#: Columns of the printed table, and the arrays in each. `served` are the logits of prefill and score.
COLUMNS: Final = ("preprocessed", "encoded", "layers", "K/V", "user", "item", "logits", "predictions", "served")
INPUTS: Final = (
    "uih_item_id", "uih_category_id", "uih_action_weight", "uih_timestamp", "cand_item_id", "cand_category_id",
    "cand_query_time",
)  # fmt: skip
#: A field of the inputs → its table.
TABLE_OF: Final = {
    "user_id": "user",
    **{f"{part}_{table}_id": table for part in ("uih", "cand") for table in ("item", "category")},
}

Floats = npt.NDArray[np.float32]


@dataclass
class ModeResult:
    """The result of one mode. deviations: the largest by key of COLUMNS."""

    name: str
    requests: int = 0
    arrays: int = 0
    deviations: dict[str, float] = field(default_factory=dict)

    @property
    def conforms(self) -> bool:
        """Whether no deviation exceeds LIMIT."""
        return bool(self.deviations) and bool(np.max(list(self.deviations.values())) <= LIMIT)  # False for NaN

    def add(self, array: str, found: Floats, expected: Floats) -> None:
        """Compare one array and keep the largest deviation."""
        column = _column(array)
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        worst = float(np.abs(found.astype(np.float64) - expected).max(initial=0.0)) / scale
        self.deviations[column] = float(np.max([worst, self.deviations.get(column, 0.0)]))
        self.arrays += array != "served"


def is_dlrm(arrays: ReferenceArrays) -> bool:
    """Whether the file has this layout."""
    return CONFIG in arrays.names()


def run_dlrm_conformance(arrays: ReferenceArrays, dtype: torch.dtype, kernels: Kernels) -> list[ModeResult]:
    """Compare every array of the file. Raises InputError for what is missing, ModelError for another type."""
    if dtype != torch.float32:
        raise ModelError(
            "these arrays are compared in float32; use `relaygr model check --dtype` on the imported model for others"
        )
    file = _ArrayFile(arrays)
    results: dict[str, ModeResult] = {}
    for mode, request, last_row, names in file.cases():
        shown = mode or ("triton" if names[0].startswith(TRITON) else "reference")
        result = results.setdefault(shown, ModeResult(shown))
        result.requests += 1
        model = file.model(mode, request, last_row, kernels)
        found = _trace(model, file.inputs(request), kernels)
        found["predictions"] = file.predictions(found["logits"])
        for name in names:
            expected = file.array(mode, request, name)
            result.add(
                name.removeprefix(TRITON),
                _like(found, name.removeprefix(TRITON), expected, file.rows(request)),
                expected,
            )
        logits = next((name for name in names if name.endswith("logits")), None)
        if logits:
            expected = file.array(mode, request, logits)
            result.add("served", _as(expected, _served(model, file.inputs(request))), expected)
    if not results:
        raise InputError(f"{arrays.path}: no arrays `out/MODE/REQUEST/ARRAY`")
    return list(results.values())


def format_dlrm_table(results: Iterable[ModeResult]) -> str:
    """A table with one line per mode: the largest deviations, and whether they conform."""
    rows = [["mode", "requests", "arrays", *COLUMNS, "conforms"]]
    for one in results:
        cells = (f"{one.deviations[key]:.1e}" if key in one.deviations else "–" for key in COLUMNS)
        rows.append([one.name, str(one.requests), str(one.arrays), *cells, "yes" if one.conforms else "NO"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


class _ArrayFile:
    """The file's inputs, outputs and weights."""

    def __init__(self, arrays: ReferenceArrays) -> None:
        self._arrays = arrays
        try:
            self.config: dict[str, Any] = json.loads(arrays.text(CONFIG))
        except ValueError as error:
            raise InputError(f"{arrays.path}: `{CONFIG}` is not JSON: {error}") from error
        if not isinstance(self.config, dict):
            raise InputError(f"{arrays.path}: `{CONFIG}` is not a JSON object")
        self._ids = {table: self._ids_of(table) for table in TABLES_OF}
        self._weights = self._state_dict()
        self._made: tuple[tuple[Any, ...], DlrmHSTU] | None = None

    def cases(self) -> Iterator[tuple[str, str, int, list[str]]]:
        """(mode, request, last row of the time table, names of arrays); mode "" for a file without modes."""
        groups: dict[tuple[str, str, bool], list[str]] = {}
        for key in self._arrays.names():
            match key.split("/"):
                case ["out", mode, request, name]:
                    pass
                case ["out", request, name]:
                    mode = ""
                case _:
                    continue
            if name not in ("N", "rows"):
                groups.setdefault((mode, request, name.startswith(TRITON)), []).append(name)
        for (mode, request, triton), names in sorted(groups.items()):
            key = mode or ("triton_logits" if triton else "logits")
            yield mode, request, self._fact("time_last_row", key), names

    def inputs(self, request: str) -> dict[str, npt.NDArray[np.int64]]:
        """The request's inputs; ids are rows of the tables of the model."""
        found = {name: self._arrays.get(f"in/{request}/{name}", (None,)).astype(np.int64) for name in INPUTS}
        found["user_id"] = self._arrays.get(f"in/{request}/user_id", ()).astype(np.int64)
        return {
            name: np.searchsorted(self._ids[TABLE_OF[name]], value) if name in TABLE_OF else value
            for name, value in found.items()
        }

    def predictions(self, logits: Floats) -> Floats:
        """(m, tasks) of logits (m, tasks): a probability, but of a regression the number itself."""
        kinds = [str(task[-1]) for task in self.config.get("tasks", [["rating", 1, ""]])]
        plain = np.array(["regression" in kind.lower() for kind in kinds])
        found: Floats = np.where(plain, logits, torch.sigmoid(torch.from_numpy(logits)).numpy())
        return found

    def array(self, mode: str, request: str, name: str) -> Floats:
        """One expected array."""
        return self._arrays.any(self._key(mode, request, name)).astype(np.float32)

    def rows(self, request: str) -> npt.NDArray[np.int64]:
        """Which rows the arrays `…_rows` have."""
        key = f"out/{request}/rows"
        return self._arrays.get(key, (None,)).astype(np.int64) if key in self._arrays.names() else np.zeros(0, np.int64)

    def model(self, mode: str, request: str, last_row: int, kernels: Kernels) -> DlrmHSTU:
        """The model with the mode's N and last row; in the mode `incremental`, the one that grows prefixes."""
        if mode in FIXED:
            scale = int(self._fact("fixed_N"))
        else:
            scale = int(self._arrays.get(self._key(mode, request, "N"), ()))
        inputs = self.inputs(request)
        own = 1 + len(inputs["uih_item_id"]) + len(inputs["cand_item_id"])
        if scale == own and kernels == "auto":
            scale = 0  # the request's own N, as it is served; kernels have a constant one
        key = (mode == INCREMENTAL, scale, last_row)
        if self._made is None or self._made[0] != key:
            self._made = key, self._make(*key, kernels)
        return self._made[1]

    def _make(self, incremental: bool, scale: int, last_row: int, kernels: Kernels) -> DlrmHSTU:
        choices = Choices(
            heads=int(self._fact("heads")),
            scale_tokens=scale,
            time_last_row=last_row,
            min_tokens=int(self._fact("min_uih")),
            max_attn_len=int(self.config.get("max_attn_len", 0)),
            contextual_seq_len=int(self.config.get("stu_contextual_seq_len", 0)),
            tasks=tuple(str(task[0]) for task in self.config.get("tasks", [["rating"]])),
        )
        weights = dict(self._weights)
        if incremental:
            choices = Choices(**vars(choices) | {"times": "constant", "positions": "none", "min_tokens": 0})
        model = model_of(self._arrays.path, weights, choices).model
        return model.place(torch.device("cpu"), torch.float32, kernels)

    def _state_dict(self) -> dict[str, torch.Tensor]:
        stored = {key.removeprefix("w/"): key for key in self._arrays.names() if key.startswith("w/")}
        formula = FormulaWeights(self.config, self._arrays.path)
        found = {name: torch.from_numpy(self._arrays.any(key)) for name, key in stored.items()} or formula.dense()
        if ACTION_WEIGHTS not in found and "action_weights" in self.config:
            found[ACTION_WEIGHTS] = torch.tensor(self.config["action_weights"])
        for table, reference in TABLES_OF.items():  # the rows in use alone: a table may have a billion
            name, ids = f"{TABLES}{reference}.weight", self._ids[table]
            if name not in found:
                found[name] = formula.rows(name, ids)
            elif len(ids) and int(ids[-1]) >= len(found[name]):
                raise InputError(f"{self._arrays.path}: id {ids[-1]} is behind the table `w/{name}`")
            else:
                found[name] = found[name][torch.from_numpy(ids)]
        return found

    def _ids_of(self, table: str) -> npt.NDArray[np.int64]:
        """The ids that the requests use, sorted."""
        names = [name for name, its in TABLE_OF.items() if its == table]
        keys = [key for key in self._arrays.names() if key.startswith("in/") and key.rsplit("/", 1)[1] in names]
        if not keys:
            raise InputError(f"{self._arrays.path}: key `in/REQUEST/{names[0]}` is missing")
        return np.unique(np.concatenate([self._arrays.any(key).astype(np.int64).ravel() for key in keys]))

    def _fact(self, *names: str) -> Any:
        value: Any = self.config
        for name in names:
            if not isinstance(value, dict) or name not in value:
                raise InputError(f"{self._arrays.path}: `{CONFIG}` has no `{'.'.join(names)}`")
            value = value[name]
        return value

    @staticmethod
    def _key(mode: str, request: str, name: str) -> str:
        return "/".join(filter(None, ("out", mode, request, name)))


@torch.no_grad()
def _trace(model: DlrmHSTU, inputs: dict[str, npt.NDArray[np.int64]], kernels: Kernels) -> dict[str, Floats]:
    """Every array of one request but predictions: rows are the user's token, the history, then the candidates."""
    embedding, config = model.embedding, model.config
    history, candidates = len(inputs["uih_item_id"]), len(inputs["cand_item_id"])
    times = inputs["cand_query_time"]
    stated = StatedQuery(int(times[-1]), candidates)
    prefix = embedding.token_rows(_tokens(model, inputs), 0, history, stated)
    own = embedding.candidate_rows(inputs["cand_item_id"], inputs["cand_category_id"], times, stated.query_time)
    rows = np.concatenate([prefix, own], axis=1)
    vectors = embedding.vectors(rows)
    x = embedding.encoded(vectors, rows)
    found = {"preprocessed": vectors, "encoded": x}
    scale = 0 if config.scale_tokens else 1 + history + candidates
    for index, layer in enumerate(model.stack.stu_layers()):
        keys, values = layer.project_kv(x)
        stack = _one_layer(model, index, kernels)
        region = KVRegion.new(stack.config.layout(torch.float32), 1 + history, torch.nan)
        before = stack.prefill(region, x[: 1 + history], scale_tokens=scale)
        behind = stack.score([RankingRows(region, 0, candidates, scale_tokens=scale)], x[1 + history :])
        held = (part.transpose(0, 1) for part in region.layer(0))
        for name, cached, of_all in zip("kv", held, (keys, values), strict=True):
            found[f"{name}{index}"] = torch.cat([cached, of_all.transpose(0, 1)[1 + history :]])
        x = torch.cat([before, behind])
        found[f"layer{index}"] = x
    found["user"] = model.head.user_side(x[1 + history :], times)
    found["item"] = model.head.item(embedding.items_of(own))
    found["logits"] = model.head.logits(found["user"], found["item"])
    return {name: value.numpy() for name, value in found.items()}


def _one_layer(model: DlrmHSTU, index: int, kernels: Kernels) -> HSTUStack:
    stack = HSTUStack(msgspec.structs.replace(model.stack.config, layers=1))
    stack.layers[0] = model.stack.layers[index]
    return stack.place(torch.device("cpu"), torch.float32, kernels if model.config.scale_tokens else "torch")


def _tokens(model: DlrmHSTU, inputs: dict[str, npt.NDArray[np.int64]]) -> Tokens:
    """The user's token and the history, as a worker gives them to the model."""
    schema, history = model.features, len(inputs["uih_item_id"])
    array = np.zeros((ROWS + schema.words, 1 + history), np.int64)
    array[0, 1:], array[1, 1:] = inputs["uih_item_id"], inputs["uih_action_weight"]
    array[1, 0] = USER_ACTION
    stated = {
        "user_id": inputs["user_id"],
        "query_time": inputs["cand_query_time"][-1],
        "candidates": len(inputs["cand_item_id"]),
    }
    _write(schema, "user", stated, 1, array[ROWS:, :1])
    _write(schema, "behaviour", inputs, history, array[ROWS:, 1:])
    return Tokens(array)


def _write(
    schema: FeatureSchema,
    table: Literal["user", "behaviour"],
    values: Mapping[str, npt.ArrayLike],
    count: int,
    words: npt.NDArray[np.int64],
) -> None:
    own: dict[Table, int] = {table: count}
    packed = schema.pack({one.name: values[one.name] for one in schema.table(table)}, own)
    schema.to_words(table, packed[table], words)


def _served(model: DlrmHSTU, inputs: dict[str, npt.NDArray[np.int64]]) -> Floats:
    """The logits (m, tasks) by `prefill` and `score`; of an incremental model, in chunks."""
    tokens = _tokens(model, inputs)
    region = KVRegion.new(model.layout, len(tokens) + 3, torch.nan)
    step = CHUNK if model.incremental else len(tokens)
    for start in range(0, len(tokens), step):
        model.prefill(region, tokens.slice(start, min(start + step, len(tokens))))
    names = (CANDIDATE_CATEGORY.name, CANDIDATE_TIME.name)
    features = {name: inputs[name][:, None] for name in names}
    none = Tokens.zeros(0, model.features)
    return model.score([ScoreInput(region, none, inputs["cand_item_id"], features)])[0].numpy()


def _like(found: dict[str, Floats], name: str, expected: Floats, rows: npt.NDArray[np.int64]) -> Floats:
    """The array `name` in the form of `expected`: the rows that the file has."""
    known = name.removesuffix("_rows")
    if known not in found:
        raise InputError(f"the model has no array {name!r}; it has {', '.join(found)}")
    if known != name:
        return _as(expected, found[known][rows])
    return _as(expected, found[name][: len(expected)] if name in ("user", "item") else found[name])


def _as(expected: Floats, found: Floats) -> Floats:
    """`found` without the dimension of a single task; transposed where the file has tasks first."""
    if found.shape == expected.shape:
        return found
    if found.size == expected.size and found.shape[-1] == 1:
        return found.reshape(expected.shape)
    if found.T.shape == expected.shape:
        return found.T
    raise InputError(
        f"an array is {' × '.join(map(str, expected.shape))}, the model has {' × '.join(map(str, found.shape))}"
    )


def _column(array: str) -> str:
    name = array.removesuffix("_rows")
    if name.startswith("layer"):
        return "layers"
    return "K/V" if name[:1] in "kv" and name[1:].isdigit() else name
