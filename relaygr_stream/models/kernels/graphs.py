"""Scoring and prefill through recorded graphs, one per bucket of sizes, so that the device does not wait for launches.

A layer has about ten launches, each shorter than the host takes to issue it unless thousands of rows are computed. A
recorded graph issues all of them at once. Its inputs have fixed addresses: the rows to embed and the table of tiles, in
one copy. Sizes are rounded up to buckets; the results of the padding are not read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Whole calls of a placed model through recordings: scoring, from indices to logits, and short prefills.

    The stack must have fused layers, because their launches fit any batch.
    """

    def __init__(self, embedding: TokenEmbedding, stack: HSTUStack, head: TaskHead, recorder: Recorder) -> None:
        assert stack.fused is not None
        self._fused = stack.fused
        self._layers = stack.stu_layers()
        self._tables = embedding
        self._embedding = RowEmbedding(embedding)
        self._head = head
        device, dtype = embedding.item.device, embedding.item.dtype
        self._scores = Graphs("scoring", self._logits, recorder, device, LIMITS[dtype])
        self._prefills = Graphs("prefill", self._append, recorder, device, LIMITS[dtype], most_rows=MAX_PREFILL)
        config = stack.config
        self._token_flops = 2 * sum(weight.numel() for weight in stack.parameters())
        self._pair_flops = 2 * config.layers * config.heads * (config.dqk + config.dv)
        self._most_flops = PREFILL_FLOPS[dtype]

    def logits(self, tokens: Sequence[RankingTokens], batch: Sequence[RankingRows]) -> torch.Tensor | None:
        """Logits (n, tasks) of all rows of a batch, suffix rows included; None if there is no recording for it."""
        count = sum(one.suffix + one.candidates for one in batch)
        output = self._run(self._scores, tokens, batch, lambda output: [output[:count]])
        # Graphs share memory: the next replay overwrites this output.
        return None if output is None else output[:count].clone()

    def prefill(self, kv: KVRegion, tokens: Tokens) -> bool:
        """Append the K/V of `tokens`, which fit, and advance kv.length; False, and nothing done, without a recording.

        Long prefills have none: they go layer by layer, so that a ranking may come between.
        """
        start, count = kv.length, len(tokens)
        flops = count * (self._token_flops + self._pair_flops * (start + count / 2))
        if not count or flops > self._most_flops:
            return False

        def written(_: torch.Tensor) -> list[torch.Tensor]:
            return [part[:, start : start + count] for index in range(len(self._layers)) for part in kv.layer(index)]

        sequence, batch = (tokens, start, np.zeros(0, np.int64)), [RankingRows(kv, count, 0)]
        if self._run(self._prefills, [sequence], batch, written) is None:
            return False
        kv.length += count
        return True

    def _run(
        self, graphs: Graphs, tokens: Sequence[RankingTokens], batch: Sequence[RankingRows], results: Results
    ) -> torch.Tensor | None:
        if not graphs.on:
            return None
        unknown, output = self._tables.unknown_items, None
        try:
            output = graphs.run(self._embedding.rows(tokens), self._fused.table(batch), results)
            return output
        finally:
            if output is None:  # the caller embeds the same rows, and counts them
                self._tables.unknown_items = unknown

    def _logits(self, rows: torch.Tensor, tiles: torch.Tensor, split: bool) -> torch.Tensor:
        x = self._embedding.embed(rows)
        return self._head.logits(self._fused.run(self._layers, x, tiles, split=split))

    def _append(self, rows: torch.Tensor, tiles: torch.Tensor, split: bool) -> torch.Tensor:
        self._fused.append(self._layers, self._embedding.embed(rows), tiles, split=split)
        return rows[:1, :1].float()  # the results stand in the region; a recording keeps its output's memory


# Recordings.

#: Indices per token to embed: item, position, action, gap.
INDICES: Final = 4
#: Most rows of a recorded scoring call. For larger sizes, issuing the launches takes less time than computing them, and
#: the partial sums of one layer would exceed 64 MiB (1,024 tiles × 64 rows × 256 wide in float32).
MAX_ROWS: Final = 2048
MAX_TILES: Final = 1024
#: Most tokens of a recorded prefill: the longest chunk (engine/cost_model.py).
MAX_PREFILL: Final = 4096
#: Most operations of a recorded prefill, products and attention: 2 to 4 ms on an H100. float32 has no tensor cores.
PREFILL_FLOPS: Final = {torch.float32: 1e11, torch.bfloat16: 1e12, torch.float16: 1e12}
#: The smallest bucket of rows and of tiles: below it, the size hardly changes the time of a graph.
MIN_BUCKET: Final = 16
#: Recordings of a kind of call. Buckets of rows are powers of two and the middles between them (16, 24, 32, 48, …):
#: at most a third is padding. There are 15 of them for scoring and 17 for prefill, and 7 of tiles, with rows cut along
#: their columns or not; a worker's traffic uses some of the pairs. A graph holds its nodes (about 100 KiB) and its
#: inputs; intermediates share one pool.
MAX_GRAPHS: Final = 48
#: A bucket is recorded at its second request: recording takes as long as about ten rankings.
RECORD_FROM: Final = 2
#: So many calls of a bucket are live after its recording has found no memory.
TRY_AGAIN: Final = 1000
#: Largest deviation of a replay from the direct computation, relative to the largest logit, or element of K and V:
#: libraries may choose another algorithm while recording. In half precision it allows a few roundings of the last
#: layer's output.
LIMITS: Final = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}

#: rows (4, r), tiles (t, fields) on the device, whether any row is cut → an output, if only a sign that it ran.
Body = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
#: The output → views of all results, in the output or elsewhere. The next run overwrites them.
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
        # A capture that fails leaves its stream current. Thread-local: the thread that copies between cache tiers
        # allocates and waits meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            output = run()
        return Recording(output, graph.replay)


@dataclass(frozen=True)
class _Bucket:
    """A recording, and its inputs."""

    inputs: torch.Tensor
    recording: Recording


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
    def run(self, rows: npt.NDArray[np.int64], table: npt.NDArray[np.int64], results: Results) -> torch.Tensor | None:
        """The output for indices (4, n) and a table of tiles, until the next run; None if there is no recording."""
        count = rows.shape[1]
        if not self.on or count > self._most_rows or len(table) > MAX_TILES:
            return None
        size = _Size(bucket_rows(count), bucket_tiles(len(table)), is_split(table))
        bucket = self._buckets.get(size)
        if bucket is None:
            self._seen[size] += 1
            if self._seen[size] < RECORD_FROM:
                return None
            bucket = self._record(size, _packed(rows, table, size), results)
            if bucket is None:
                return None
        self._buckets.move_to_end(size)
        bucket.inputs.copy_(_packed(rows, table, size), non_blocking=True)
        bucket.recording.replay()
        return bucket.recording.output

    def _record(self, size: _Size, packed: torch.Tensor, results: Results) -> _Bucket | None:
        """A recording of that size whose replay on `packed` equals `body`. None for now, without memory or a finite
        result; None for good, and off, where it fails or differs.
        """
        try:
            inputs = packed.to(self._device, copy=True)
            rows, tiles = _unpacked(inputs, size)
            expected = [one.clone() for one in results(self._body(rows, tiles, size.split))]
            if not all(one.isfinite().any() for one in expected):  # they would hide what a replay does
                self._seen[size] = 0
                return None
            recording = self._recorder.record(lambda: self._body(rows, tiles, size.split))
            for one in results(recording.output):
                one.fill_(torch.finfo(one.dtype).max)  # what a replay does not write deviates
            recording.replay()
            deviation = max(map(_deviation, results(recording.output), expected))
        except torch.OutOfMemoryError:
            self._seen[size] = -TRY_AGAIN
            return None
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
        bucket = self._buckets[size] = _Bucket(inputs, recording)
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
