"""The built-in ranking model: embeddings, HSTU stack and task head behind the model protocol.

loading.py gives it weights, from a checkpoint or from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

import torch
from msgspec import Meta, to_builtins

from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.built_in import StackedModel
from relaygr_stream.models.embeddings import ACTIONS, TaskHead, TokenEmbedding
from relaygr_stream.models.hstu import FusedLayers, HSTUStack
from relaygr_stream.models.item_ids import ItemIds
from relaygr_stream.models.kernels.choice import fused_stack
from relaygr_stream.models.kernels.graphs import CudaRecorder, Recorder
from relaygr_stream.models.kernels.recorded import RecordedModel
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.mapped import MappedTable
from relaygr_stream.models.native.ends import NativeEnds, Sequences
from relaygr_stream.models.relative import MOST_BUCKETS, is_relative
from relaygr_stream.models.stu import Count, Positive, RankingRows, StackConfig
from relaygr_stream.settings import Kernels
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema

#: Fields of the configuration that the first release did not have.
LATER_FIELDS: Final = ("oov_rows", "features", "relative_positions", "relative_times", "actions", "listed_items")


class HSTUConfig(StackConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole definition of an HSTU model apart from its weights: the layers' shape, tables and score columns.

    oov_rows: rows of the item table behind the vocab rows, for ids outside [0, vocab), by hash (embeddings.py). 0: such
    an id shares a known item's row, id mod vocab. features: the columns it reads; a category needs its `rows`. actions:
    what each row of the action table stands for in the log of the training, "" for none; empty: the log's own numbers.
    listed_items: ids are those of the checkpoint's items.json, by row; otherwise they are the rows.
    """

    architecture: ClassVar[str] = "hstu"

    vocab: Positive
    oov_rows: Count = 0
    max_positions: Positive
    tasks: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]
    features: tuple[FeatureColumn, ...] = ()
    actions: Annotated[tuple[str, ...], Meta(max_length=ACTIONS)] = ()
    listed_items: bool = False

    def __post_init__(self) -> None:
        if len(named := list(filter(None, self.actions))) != len(set(named)):
            raise ValueError('`actions` has a name twice; each row of the action table has one of its own, or ""')
        if self.listed_items and not self.oov_rows:
            raise ValueError("`listed_items` needs `oov_rows` for ids that are not in the list")
        FeatureSchema(self.features)  # raises ValueError for a name that stands there twice
        if self.contextual_seq_len and is_relative(self):
            raise ValueError("contextual_seq_len and a bias on relative positions or times exclude each other")
        if self.relative_times > MOST_BUCKETS:
            raise ValueError(
                f"relative_times = {self.relative_times} is over {MOST_BUCKETS} buckets, which reach 1,000 years"
            )
        for one in self.features:
            if "." in one.name:
                raise ValueError(f"the feature {one.name!r} has a dot, which no weight's name may have")
            if (one.dtype == "float32") == bool(one.rows):
                wanted = "no `rows`" if one.rows else "`rows` of at least 1, its embedding table's"
                raise ValueError(f"the {one.dtype} feature {one.name!r} needs {wanted}")

    @property
    def item_table(self) -> tuple[int, int]:
        """The shape of the item table."""
        return self.vocab + self.oov_rows, self.dim

    def fields(self) -> dict[str, Any]:
        """The fields as config.json has them. Later fields are left out at their defaults: the model's version stays
        what it was before these fields were there, and an older release reads the file."""
        fields: dict[str, Any] = to_builtins(self)
        return {name: value for name, value in fields.items() if value or name not in LATER_FIELDS}


class HSTUModel(StackedModel):
    """HSTU as a `RankingModel`."""

    config: HSTUConfig
    embedding: TokenEmbedding

    def __init__(self, config: HSTUConfig, table: MappedTable | None = None) -> None:
        features = FeatureSchema(config.features)
        embedding = TokenEmbedding(config.dim, config.vocab, config.max_positions, config.oov_rows, features, table)
        super().__init__(config, embedding, features)
        self.stack = HSTUStack(config)
        self.head = TaskHead(config.dim, len(config.tasks))
        self.incremental = self.stack.incremental
        self._recorded: RecordedModel | None = None
        self._ends: NativeEnds | None = None
        self.item_ids: ItemIds | None = None

    def _files(self) -> dict[str, str]:
        return super()._files() | ({} if self.item_ids is None else {"items": self.item_ids.digest})

    def place(self, device: torch.device, dtype: torch.dtype, kernels: Kernels = "auto") -> Self:
        """As of all families. The head stays float32."""
        self._place_embedding(device, dtype)
        self.stack.place(device, dtype, kernels)
        self.head.to(device=device)
        # The embedding in C, and the recorded one, read no features, and hold the whole table.
        plain = not self.features and self.embedding.table is None
        self._ends = None if not plain else self.stack.native_ends(self.embedding, self.head)
        fused = fused_stack(self.config, device, dtype, kernels)
        self.use(fused, None if fused is None else CudaRecorder(device))
        return self

    def use(self, fused: FusedLayers | None, recorder: Recorder | None) -> None:
        """Use `fused` for attention from now on, its launches recorded by `recorder`; None: plain torch operators."""
        self.stack.fused = fused
        self._recorded = None
        if fused is not None and recorder is not None and not self.features and self.embedding.table is None:
            self._recorded = RecordedModel(self.embedding, self.stack, self.head, recorder)

    @torch.no_grad()
    def _steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        if self.item_ids is not None:
            tokens = self.item_ids.tokens(tokens)
        if self._recorded is not None:
            self.stack.check_room(kv, len(tokens))
            if self._recorded.prefill(kv, tokens):
                return
        x = (self._ends or self.embedding).behaviours(tokens, kv.length)
        yield from self.stack.append_in_steps(kv, x, self._times(kv, tokens))

    def _times(self, kv: KVRegion, tokens: Tokens) -> torch.Tensor | None:
        """The times of tokens behind those in `kv`, for a stack that compares them."""
        if not self.config.relative_times:
            return None
        gaps = torch.from_numpy(tokens.array[2]).cumsum(0)
        return gaps + kv.times(kv.length - 1, kv.length).cpu() if kv.length else gaps

    @torch.no_grad()
    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Logits of each ranking, float32 (m_i, tasks). Raises ModelError for a suffix if `incremental` is False."""
        if not batch:
            return []
        tokens = [(one.suffix, one.kv.length, one.candidates) for one in batch]
        if (ids := self.item_ids) is not None:
            tokens = [(ids.tokens(suffix), first, ids.rows(candidates)) for suffix, first, candidates in tokens]
        rows = [
            RankingRows(one.kv, len(one.suffix), len(one.candidates), self._times(one.kv, one.suffix)) for one in batch
        ]
        counts = [one.candidates for one in rows]
        if self._recorded is not None:
            logits = self._recorded.logits(tokens, rows)
            if logits is not None:
                return list(torch.split(_of_candidates(logits, rows), counts))
        if self._ends is not None:
            sequences = Sequences(tokens)
            out = self.stack.score(rows, self._ends.embed(sequences))
            return list(torch.split(self._ends.logits(sequences, out), counts))
        x = self.embedding.rankings(tokens, [one.features for one in batch])
        out = _of_candidates(self.stack.score(rows, x), rows)
        return list(torch.split(self.head.logits(out), counts))


def _of_candidates(out: torch.Tensor, batch: Sequence[RankingRows]) -> torch.Tensor:
    """The candidates' rows of `out`, which holds all rows of the batch."""
    if not any(one.suffix for one in batch):
        return out
    return torch.cat(torch.split(out, [count for one in batch for count in (one.suffix, one.candidates)])[1::2])
