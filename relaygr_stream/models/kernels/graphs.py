"""Scoring and prefill through recorded graphs, one per bucket of sizes, so that the device does not wait for launches.

A layer has about ten launches, each shorter than the host takes to issue it unless thousands of rows are computed. A
recorded graph issues all of them at once. Its inputs have fixed addresses: the rows to embed and the table of tiles, in
one copy. Sizes are rounded up to buckets; the results of the padding are not read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from relaygr_stream.models.api import Tokens
from relaygr_stream.models.embeddings import ACTIONS, GAP_BUCKETS, RankingTokens, TaskHead, TokenEmbedding
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.kernels.tiles import Field, is_split
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.stu import RankingRows

log = structlog.get_logger(__name__)


class RowEmbedding:
    """`TokenEmbedding.rankings` in two steps: indices on the host, sums on the device.

    It copies the two small tables, so it must be created after the weights are placed.
    """

    def __init__(self, embedding: TokenEmbedding) -> None:
        self._embedding = embedding
        self._action = torch.cat([embedding.action, embedding.candidate[None]])
        self._gap = torch.cat([embedding.gap, torch.zeros_like(embedding.gap[:1])])

    def rows(self, batch: Sequence[RankingTokens]) -> npt.NDArray[np.int64]:
        """Indices (4, n) into the tables: item, position, action, gap."""
        rows, bounds = self._embedding.ranking_rows(batch)
        for _, middle, stop in bounds:
            rows[2, middle:stop] = ACTIONS
            rows[3, middle:stop] = GAP_BUCKETS
        return rows

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Vectors (n, D) for indices (4, n) on the device."""
        x = self._embedding.item.index_select(0, rows[0]).add_(self._embedding.position.index_select(0, rows[1]))
        return x.add_(self._action.index_select(0, rows[2])).add_(self._gap.index_select(0, rows[3]))


class RecordedModel:
    """Whole calls of a placed model through recordings: scoring, from indices to logits, and prefill.

    The stack must have fused layers, because their launches fit any batch.
    """

    def __init__(self, embedding: TokenEmbedding, stack: HSTUStack, head: TaskHead, recorder: Recorder) -> None:
        assert stack.fused is not None
        self._fused = stack.fused
        self._layers = stack.stu_layers()
        self._tables = embedding
        self._embedding = RowEmbedding(embedding)
        self._head = head
        device, limit = embedding.item.device, LIMITS[embedding.item.dtype]
        self._scores = Graphs("scoring", self._logits, recorder, device, limit)
        self._prefills = Graphs("prefill", self._append, recorder, device, limit, most_rows=MAX_PREFILL)
        self._row_flops = 2 * sum(weight.numel() for layer in self._layers for weight in layer.parameters())

    def logits(self, tokens: Sequence[RankingTokens], batch: Sequence[RankingRows]) -> torch.Tensor | None:
        """Logits (n, tasks) of all rows of a batch, suffix rows included; None if there is no recording for it."""
        count = sum(one.suffix + one.candidates for one in batch)
        use = self._find(self._scores, tokens, batch, lambda output: [output[:count]])
        if use is None:
            return None
        for _ in use.in_steps():
            pass
        # Graphs share memory: the next replay overwrites this output.
        return use.output[:count].clone()

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Generator[None, None, bool]:
        """Append the K/V of `tokens`, which fit, and advance kv.length; returns False, without a step, if there is no
        recording for it. Between steps the caller may make any call that does not write behind kv.length.
        """
        start, stop = kv.length, kv.length + len(tokens)
        if start == stop:
            return False

        def written(_: torch.Tensor) -> list[torch.Tensor]:
            return [part[:, start:stop] for index in range(len(self._layers)) for part in kv.layer(index)]

        sequence, batch = (tokens, start, np.zeros(0, np.int64)), [RankingRows(kv, len(tokens), 0)]
        use = self._find(self._prefills, [sequence], batch, written)
        if use is None:
            return False
        yield from use.in_steps()
        kv.length = stop
        return True

    def _find(
        self, graphs: Graphs, tokens: Sequence[RankingTokens], batch: Sequence[RankingRows], results: Results
    ) -> Use | None:
        if not graphs.on:
            return None
        unknown, use = self._tables.unknown_items, None
        try:
            use = graphs.find(self._embedding.rows(tokens), self._fused.table(batch), results)
            return use
        finally:
            if use is None:  # whoever embeds the same rows then counts them
                self._tables.unknown_items = unknown

    def _logits(self, rows: torch.Tensor, tiles: torch.Tensor, split: bool) -> list[Stage]:
        def all_of_it() -> torch.Tensor:
            x = self._fused.run(self._layers, self._embedding.embed(rows), tiles, split=split)
            return self._head.logits(x)

        return [all_of_it]

    def _append(self, rows: torch.Tensor, tiles: torch.Tensor, split: bool) -> list[Stage]:
        count, layers = rows.shape[1], len(self._layers)
        # In memory of its own, not of a recording's: it stays while other recordings run between two stages.
        x = torch.empty((count, self._tables.item.shape[1]), dtype=self._tables.item.dtype, device=rows.device)

        def some_layers(first: int, stop: int) -> torch.Tensor:
            if not first:
                x.copy_(self._embedding.embed(rows))
            self._fused.append(self._layers, first, stop, x, tiles, split=split)
            return x

        stages = max(1, min(layers, round(count * self._row_flops / STAGE_FLOPS)))
        bounds = [layers * number // stages for number in range(stages + 1)]
        return [partial(some_layers, first, stop) for first, stop in pairwise(bounds)]


# Recordings.

#: Indices per token to embed: item, position, action, gap.
INDICES: Final = 4
#: Most rows of a recorded scoring call. For larger sizes, issuing the launches takes less time than computing them, and
#: the partial sums of one layer would exceed 64 MiB (1,024 tiles × 64 rows × 256 wide in float32).
MAX_ROWS: Final = 2048
MAX_TILES: Final = 1024
#: Most tokens of a recorded prefill: the longest chunk (engine/cost_model.py). To launch 24 layers of width 2,048 takes
#: as long as an H100 takes to compute 4,096 tokens.
MAX_PREFILL: Final = 4096
#: A prefill is recorded in stages of so many operations of its products, whole layers: 1 ms or so on an H100, beside
#: which a replay and a wait for it are short. A ranking that comes meanwhile waits for one stage.
STAGE_FLOPS: Final = 5e11
#: The smallest bucket of rows and of tiles: below it, the size hardly changes the time of a graph.
MIN_BUCKET: Final = 16
#: Recordings of a kind of call. Buckets of rows are powers of two and the middles between them (16, 24, 32, 48, …):
#: at most a third is padding. There are 15 of them for scoring and 17 for prefill, and 7 of tiles, with rows cut along
#: their columns or not; a worker's traffic uses some of the pairs. A graph holds its nodes (about 100 KiB), its
#: inputs and what stands between two stages; intermediates share one pool.
MAX_GRAPHS: Final = 48
#: A bucket is recorded at its second request: recording takes as long as about ten rankings.
RECORD_FROM: Final = 2
#: Largest deviation of a replay from the direct computation, relative to the largest logit, or element of K and V:
#: libraries may choose another algorithm while recording. In half precision it allows a few roundings of the last
#: layer's output.
LIMITS: Final = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}

#: Launches on the device; the last one's result is the output.
Stage = Callable[[], torch.Tensor]
#: rows (4, r), tiles (t, fields) on the device, whether any row is cut → the stages, which together compute anew.
Body = Callable[[torch.Tensor, torch.Tensor, bool], list[Stage]]
#: The output → views of all results, in the output or elsewhere. The next use overwrites them.
Results = Callable[[torch.Tensor], list[torch.Tensor]]


class Recording(NamedTuple):
    """A recorded computation: its output, at a fixed address, and a call that computes the output again."""

    output: torch.Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records launches on one kind of device."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Record the launches of `run`. The output may be undefined before the first replay."""
        ...


class _Size(NamedTuple):
    """A bucket of sizes, and whether rows are cut along their columns."""

    rows: int
    tiles: int
    split: bool


class CudaRecorder:
    """Records CUDA graphs. The graphs of one recorder share memory: read an output before replaying another graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: memory of the pool is used again only on the stream that it was allocated on.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Run once without capture, since libraries allocate workspaces in their first call; then capture."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: the thread that copies between cache tiers allocates and waits meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = run()
        return Recording(output, graph.replay)


@dataclass(eq=False)
class _Bucket:
    """The recordings of all stages, their inputs, and who used them last."""

    inputs: torch.Tensor
    recordings: list[Recording]
    user: Use | None = None


class Use:
    """One computation through the recordings of a bucket."""

    def __init__(self, bucket: _Bucket, packed: torch.Tensor) -> None:
        self._bucket = bucket
        self._packed = packed

    @property
    def output(self) -> torch.Tensor:
        """What the last stage gave, until the next use of any recording."""
        return self._bucket.recordings[-1].output

    def in_steps(self) -> Iterator[None]:
        """Replay the stages, one a step. Where another use of the bucket came between two steps, begin again."""
        bucket, stage = self._bucket, 0
        while stage < len(bucket.recordings):
            with torch.inference_mode():
                if bucket.user is not self:
                    bucket.user, stage = self, 0
                    bucket.inputs.copy_(self._packed, non_blocking=True)
                bucket.recordings[stage].replay()
            stage += 1
            if stage < len(bucket.recordings):
                yield


class Graphs:
    """Runs `body` through recordings. The first failure turns them off for good, with one warning that gives the name.

    Call it from one thread. limit: largest deviation from `body` itself, checked after each recording.
    """

    def __init__(
        self,
        name: str,
        body: Body,
        recorder: Recorder,
        device: torch.device,
        limit: float,
        *,
        most_rows: int = MAX_ROWS,
        most: int = MAX_GRAPHS,
    ) -> None:
        self._name = name
        self._body = body
        self._recorder = recorder
        self._device = device
        self._limit = limit
        self._most_rows = most_rows
        self._most = most
        self._seen: Counter[_Size] = Counter()
        self._buckets: OrderedDict[_Size, _Bucket] = OrderedDict()
        self.on = True

    def __len__(self) -> int:
        return len(self._buckets)

    @torch.inference_mode()
    def find(self, rows: npt.NDArray[np.int64], table: npt.NDArray[np.int64], results: Results) -> Use | None:
        """A use of recordings for indices (4, n) and a table of tiles; None if there are none.

        Raises torch.OutOfMemoryError where a recording finds no memory; it is tried again later.
        """
        count = rows.shape[1]
        if not self.on or count > self._most_rows or len(table) > MAX_TILES:
            return None
        size = _Size(bucket_rows(count), bucket_tiles(len(table)), is_split(table))
        packed = _packed(rows, table, size)
        bucket = self._buckets.get(size)
        if bucket is None:
            self._seen[size] += 1
            if self._seen[size] < RECORD_FROM:
                return None
            bucket = self._record(size, packed, results)
            if bucket is None:
                return None
        self._buckets.move_to_end(size)
        return Use(bucket, packed)

    def _record(self, size: _Size, packed: torch.Tensor, results: Results) -> _Bucket | None:
        """Recordings of that size whose replay on `packed` equals `body`; None, and off, if one fails or differs."""
        try:
            inputs = packed.to(self._device, copy=True)
            stages = self._body(*_unpacked(inputs, size), size.split)
            expected = [one.clone() for one in results([stage() for stage in stages][-1])]
            if not any(one.isfinite().any() for one in expected):
                return None  # of broken prefix KV: they would hide what a replay does
            bucket = _Bucket(inputs, [self._recorder.record(stage) for stage in stages])
            use = Use(bucket, packed)
            for one in results(use.output):
                one.fill_(torch.finfo(one.dtype).max)  # what a replay does not write deviates
            for _ in use.in_steps():
                pass
            deviation = max(map(_deviation, results(use.output), expected))
        except torch.OutOfMemoryError:
            del self._seen[size]
            raise
        except Exception as error:  # drivers and libraries may raise any exception while recording
            self._turn_off(f"{type(error).__name__}: {error}")
            return None
        if not deviation <= self._limit:
            self._turn_off(
                f"a replay deviates by {deviation:.1e} from the direct computation; the limit is {self._limit:.0e}"
            )
            return None
        while len(self._buckets) >= self._most:
            gone, _ = self._buckets.popitem(last=False)
            del self._seen[gone]
        self._buckets[size] = bucket
        return bucket

    def _turn_off(self, reason: str) -> None:
        log.warning("recorded graphs are off", of=self._name, reason=reason)
        self.on = False
        self._buckets.clear()


def bucket_rows(count: int) -> int:
    """`count` rounded up to a power of two, or to the middle between two powers."""
    power = bucket_tiles(count)
    return power * 3 // 4 if power > MIN_BUCKET and count <= power * 3 // 4 else power


def bucket_tiles(count: int) -> int:
    """`count` rounded up to a power of two; a padding tile costs nothing."""
    return max(MIN_BUCKET, 1 << (count - 1).bit_length()) if count > 1 else MIN_BUCKET


def _packed(rows: npt.NDArray[np.int64], table: npt.NDArray[np.int64], size: _Size) -> torch.Tensor:
    """Both inputs in one array, padded with zeros: index 0 of each table, and tiles that do nothing.

    The array is new memory, since the previous call's copy to the device may still be in progress.
    """
    most_rows, most_tiles, _ = size
    packed = np.zeros(INDICES * most_rows + len(Field) * most_tiles, np.int64)
    packed[: INDICES * most_rows].reshape(INDICES, most_rows)[:, : rows.shape[1]] = rows
    packed[INDICES * most_rows :].reshape(most_tiles, len(Field))[: len(table)] = table
    return torch.from_numpy(packed)


def _unpacked(inputs: torch.Tensor, size: _Size) -> tuple[torch.Tensor, torch.Tensor]:
    most_rows, most_tiles, _ = size
    rows = inputs[: INDICES * most_rows].view(INDICES, most_rows)
    return rows, inputs[INDICES * most_rows :].view(most_tiles, len(Field))


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest deviation, relative to the largest expected number. A number that is not finite, as one ranking on
    broken prefix KV gives, must be none in both: its neighbours are no worse for it.
    """
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return torch.inf
    found, expected = (torch.where(finite, one, 0).float() for one in (found, expected))
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
