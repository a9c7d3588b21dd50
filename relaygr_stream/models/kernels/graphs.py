"""Scoring through recorded graphs, one per bucket of sizes, so that the device does not wait for launches.

A ranking on a hit has about ten launches per layer, each shorter than the host takes to issue it. A recorded graph
issues all of them at once. Its inputs have fixed addresses: the rows to embed and the table of tiles, in one copy.
Sizes are rounded up to buckets; the results of the padding are not read.
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

from relaygr_stream.models.embeddings import ACTIONS, GAP_BUCKETS, RankingTokens, TaskHead, TokenEmbedding
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.kernels.tiles import Field
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


class RecordedScores:
    """A whole scoring call of a placed model, from indices to logits, through recordings.

    The stack must have fused layers, because their launches fit any batch.
    """

    def __init__(self, embedding: TokenEmbedding, stack: HSTUStack, head: TaskHead, recorder: Recorder) -> None:
        assert stack.fused is not None
        self._fused = stack.fused
        self._layers = stack.stu_layers()
        self._tables = embedding
        self._embedding = RowEmbedding(embedding)
        self._head = head
        weights = embedding.item
        self._graphs = ScoreGraphs(self._logits, recorder, weights.device, LIMITS[weights.dtype])

    def logits(self, tokens: Sequence[RankingTokens], batch: Sequence[RankingRows]) -> torch.Tensor | None:
        """Logits (n, tasks) of all rows of a batch, suffix rows included; None if there is no recording for it."""
        if not self._graphs.on:
            return None
        unknown = self._tables.unknown_items
        logits = self._graphs.score(self._embedding.rows(tokens), self._fused.table(batch))
        if logits is None:  # the caller embeds the same rows, and counts them
            self._tables.unknown_items = unknown
        return logits

    def _logits(self, rows: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        x = self._embedding.embed(rows)
        return self._head.logits(self._fused.run(self._layers, x, tiles, split=True))


# Recordings.

#: Indices per token to embed: item, position, action, gap.
INDICES: Final = 4
#: For larger sizes, issuing the launches takes less time than computing them, and the partial sums of one layer would
#: exceed 64 MiB (1,024 tiles × 64 rows × 256 wide in float32).
MAX_ROWS: Final = 2048
MAX_TILES: Final = 1024
#: The smallest bucket of rows and of tiles: below it, the size hardly changes the time of a graph.
MIN_BUCKET: Final = 16
#: Buckets of rows are powers of two and the middles between them (16, 24, 32, 48, …): at most a third is padding. There
#: are 15 buckets of rows and 7 of tiles; a worker's traffic uses some of the 105 pairs. A graph holds its nodes (about
#: 100 KiB) and its inputs; intermediates share one pool.
MAX_GRAPHS: Final = 48
#: A bucket is recorded at its second request: recording takes as long as about ten rankings.
RECORD_FROM: Final = 2
#: Largest deviation of a replay from the direct computation, relative to the largest logit: libraries may choose
#: another algorithm while recording. In half precision it allows a few roundings of the last layer's output.
LIMITS: Final = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}

#: rows (4, r), tiles (t, fields) on the device → logits (r, tasks).
Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Recording(NamedTuple):
    """A recorded computation: its output, at a fixed address, and a call that computes the output again."""

    output: torch.Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records launches on one kind of device."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Record the launches of `run`. The output may be undefined before the first replay."""
        ...


class CudaRecorder:
    """Records CUDA graphs. The graphs of one recorder share memory: read an output before replaying another graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Run once without capture, since libraries allocate workspaces in their first call; then capture."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: the thread that copies between cache tiers allocates and waits meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = run()
        return Recording(output, graph.replay)


@dataclass(frozen=True)
class _Bucket:
    """A recording, and its inputs."""

    inputs: torch.Tensor
    recording: Recording


class ScoreGraphs:
    """Computes logits through recordings of `body`. The first failure turns it off for good, with one warning.

    Call it from one thread. limit: largest deviation from `body` itself, checked after each recording.
    """

    def __init__(
        self, body: Body, recorder: Recorder, device: torch.device, limit: float, *, most: int = MAX_GRAPHS
    ) -> None:
        self._body = body
        self._recorder = recorder
        self._device = device
        self._limit = limit
        self._most = most
        self._seen: Counter[tuple[int, int]] = Counter()
        self._buckets: OrderedDict[tuple[int, int], _Bucket] = OrderedDict()
        self.on = True

    def __len__(self) -> int:
        return len(self._buckets)

    @torch.inference_mode()
    def score(self, rows: npt.NDArray[np.int64], table: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """Logits (n, tasks) for indices (4, n) and a table of tiles, in new memory; None if there is no recording."""
        count = rows.shape[1]
        if not self.on or count > MAX_ROWS or len(table) > MAX_TILES:
            return None
        size = (bucket_rows(count), bucket_tiles(len(table)))
        bucket = self._buckets.get(size)
        if bucket is None:
            self._seen[size] += 1
            if self._seen[size] < RECORD_FROM:
                return None
            bucket = self._record(size, _packed(rows, table, size), count)
            if bucket is None:
                return None
        self._buckets.move_to_end(size)
        bucket.inputs.copy_(_packed(rows, table, size), non_blocking=True)
        bucket.recording.replay()
        # Graphs share memory: the next replay overwrites this output.
        return bucket.recording.output[:count].clone()

    def _record(self, size: tuple[int, int], packed: torch.Tensor, count: int) -> _Bucket | None:
        """A recording of that size whose replay on `packed` equals `body`; None, and off, if it fails or differs."""
        try:
            inputs = packed.to(self._device, copy=True)
            rows, tiles = _unpacked(inputs, size)
            expected = self._body(rows, tiles)[:count]
            recording = self._recorder.record(lambda: self._body(rows, tiles))
            recording.replay()
            deviation = _deviation(recording.output[:count], expected)
        except Exception as error:  # drivers and libraries may raise any exception while recording
            self._turn_off(f"{type(error).__name__}: {error}")
            return None
        if not deviation <= self._limit:
            self._turn_off(
                f"a replay deviates by {deviation:.1e} from the direct computation; the limit is {self._limit:.0e}"
            )
            return None
        while len(self._buckets) >= self._most:
            self._buckets.popitem(last=False)
        bucket = self._buckets[size] = _Bucket(inputs, recording)
        return bucket

    def _turn_off(self, reason: str) -> None:
        log.warning("recorded graphs are off", reason=reason)
        self.on = False
        self._buckets.clear()


def bucket_rows(count: int) -> int:
    """`count` rounded up to a power of two, or to the middle between two powers."""
    power = bucket_tiles(count)
    return power * 3 // 4 if power > MIN_BUCKET and count <= power * 3 // 4 else power


def bucket_tiles(count: int) -> int:
    """`count` rounded up to a power of two; a padding tile costs nothing."""
    return max(MIN_BUCKET, 1 << (count - 1).bit_length()) if count > 1 else MIN_BUCKET


def _packed(rows: npt.NDArray[np.int64], table: npt.NDArray[np.int64], size: tuple[int, int]) -> torch.Tensor:
    """Both inputs in one array, padded with zeros: index 0 of each table, and tiles that do nothing.

    The array is new memory, since the previous call's copy to the device may still be in progress.
    """
    most_rows, most_tiles = size
    packed = np.zeros(INDICES * most_rows + len(Field) * most_tiles, np.int64)
    packed[: INDICES * most_rows].reshape(INDICES, most_rows)[:, : rows.shape[1]] = rows
    packed[INDICES * most_rows :].reshape(most_tiles, len(Field))[: len(table)] = table
    return torch.from_numpy(packed)


def _unpacked(inputs: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    most_rows, most_tiles = size
    rows = inputs[: INDICES * most_rows].view(INDICES, most_rows)
    return rows, inputs[INDICES * most_rows :].view(most_tiles, len(Field))


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    worst = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    return float(worst)
