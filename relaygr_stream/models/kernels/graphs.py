"""Recorded graphs, one per bucket of sizes.

The inputs of a recording have fixed addresses: the rows to embed and the table of tiles, in one copy. Sizes are rounded
up to buckets; the results of the padding are not read.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from relaygr_stream.models.kernels.tiles import TileField, is_split
from relaygr_stream.telemetry.clocks import Clock

log = structlog.get_logger(__name__)

#: Indices per token to embed: item, position, action, gap.
INDICES: Final = 4
#: Most rows of a recorded scoring call. For larger sizes, issuing the launches takes less time than computing them, and
#: the partial sums of one layer would exceed 64 MiB (1,024 tiles × 64 rows × 256 wide in float32).
MAX_ROWS: Final = 2048
MAX_TILES: Final = 1024
#: The smallest bucket of rows and of tiles: below it, the size hardly changes the time of a graph.
MIN_BUCKET: Final = 16
#: Recordings of a kind of call. Buckets of rows are powers of two and the middles between them (16, 24, 32, 48, …):
#: at most a third is padding. There are 15 of them for scoring and 17 for prefill, and 7 of tiles, with rows cut along
#: their columns or not; a worker's traffic uses some of the pairs. A graph holds its nodes (about 100 KiB) and its
#: inputs; intermediates share one pool.
MAX_GRAPHS: Final = 48
#: A bucket is recorded at its second request: recording takes as long as about ten rankings.
RECORD_FROM: Final = 2
#: So many calls of a bucket are live after its recording has found no memory. It is tried once more.
TRY_AGAIN: Final = 1000
#: A recording's time is the least of so many: the host may do something else in between.
REPLAYS: Final = 3
#: rows (4, r), tiles (t, fields) on the device, whether any row is cut → an output, if only a sign that it ran.
Body = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
#: Launches kernels; returns the output.
Run = Callable[[], torch.Tensor]
#: The output → views of all results, in the output or elsewhere. The next run overwrites them.
Results = Callable[[torch.Tensor], list[torch.Tensor]]


class Recording(NamedTuple):
    """A recorded computation: its output, at a fixed address, and a call that computes the output again."""

    output: torch.Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records launches on one kind of device."""

    def record(self, run: Run) -> Recording:
        """Record the launches of `run`. The output may be undefined before the first replay."""
        ...

    def free(self) -> None:
        """Give back the recordings' memory. None of them is used any more."""
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

    def record(self, run: Run) -> Recording:
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

    def free(self) -> None:
        """Give back the pool's memory, that of a failed capture included: it is freed with the last graph only."""
        self._pool = torch.cuda.graph_pool_handle()  # a former one may not be used again
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Bucket:
    """A recording, and its inputs."""

    inputs: torch.Tensor
    recording: Recording


class Graphs:
    """Runs `body` through recordings. The first failure turns them off for good, with one warning that gives the name.

    Call it from one thread. limit: largest deviation from `body` itself, checked after each recording. sharing: all
    that use this recorder, whose recordings share memory; this one is added. longest_ms: sizes whose replay takes
    longer are not recorded.
    """

    def __init__(
        self,
        name: str,
        body: Body,
        recorder: Recorder,
        device: torch.device,
        limit: float,
        sharing: list[Graphs] | None = None,
        *,
        longest_ms: float = math.inf,
        clock: Clock = time.perf_counter,
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
        self._longest_ms = longest_ms
        self._clock = clock
        self._refused: set[_Size] = set()  # too long, or twice without memory: not tried again
        self._lacked: set[_Size] = set()  # memory, once
        self._seen: Counter[_Size] = Counter()
        self._buckets: OrderedDict[_Size, _Bucket] = OrderedDict()
        self._sharing = [] if sharing is None else sharing
        self._sharing.append(self)
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
        if size in self._refused:
            return None
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
        made, no_memory = None, False
        try:
            made = self._compared(size, packed, results)
        except torch.OutOfMemoryError:
            no_memory = True
        except Exception as error:  # drivers and libraries may raise any exception while recording
            self._turn_off(f"{type(error).__name__}: {error}")
        if no_memory:  # not in the handler: the error's traceback keeps alive what had been allocated
            (self._refused if size in self._lacked else self._lacked).add(size)
            self._drop_all()
            self._seen[size] = -TRY_AGAIN
        if made is None:
            return None
        bucket, deviation, ms = made
        if not deviation <= self._limit:
            self._turn_off(
                f"a replay deviates by {deviation:.1e} from the direct computation; the limit is {self._limit:.0e}"
            )
            return None
        if ms > self._longest_ms:
            self._refused.add(size)
            return None
        while len(self._buckets) >= self._most:
            gone, _ = self._buckets.popitem(last=False)
            del self._seen[gone]
        self._buckets[size] = bucket
        return bucket

    def _compared(self, size: _Size, packed: torch.Tensor, results: Results) -> tuple[_Bucket, float, float] | None:
        """A recording of that size, by how much its replay deviates, and its time, ms; None if no result is finite."""
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
        deviation = max(map(_deviation, results(recording.output), expected))  # waits for the device
        return _Bucket(inputs, recording), deviation, min(self._replay_ms(recording) for _ in range(REPLAYS))

    def _replay_ms(self, recording: Recording) -> float:
        start = self._clock()
        recording.replay()
        recording.output.flatten()[0].item()  # waits for the device
        return (self._clock() - start) * 1e3

    def _drop_all(self) -> None:
        """Drop all recordings that share memory, so that it is freed. Their next use records them again."""
        for graphs in self._sharing:
            for size in graphs._buckets:
                graphs._seen[size] = RECORD_FROM - 1
            graphs._buckets.clear()
        self._recorder.free()

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
    packed = np.zeros(INDICES * most_rows + len(TileField) * most_tiles, np.int64)
    packed[: INDICES * most_rows].reshape(INDICES, most_rows)[:, : rows.shape[1]] = rows
    packed[INDICES * most_rows :].reshape(most_tiles, len(TileField))[: len(table)] = table
    return torch.from_numpy(packed)


def _unpacked(inputs: torch.Tensor, size: _Size) -> tuple[torch.Tensor, torch.Tensor]:
    most_rows, most_tiles, _ = size
    rows = inputs[: INDICES * most_rows].view(INDICES, most_rows)
    return rows, inputs[INDICES * most_rows :].view(most_tiles, len(TileField))


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest deviation, relative to the largest expected number. A number that is not finite, as one ranking on
    broken prefix KV gives, must be none in both: its neighbours are no worse for it.
    """
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return torch.inf
    found, expected = (torch.where(finite, one, 0).float() for one in (found, expected))
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
