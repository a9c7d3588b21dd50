"""How close the built-in model comes to the machine: every time beside its floor, all measured in one run.

    python benchmarks/model.py [--device cpu] [--dtype bfloat16] [--prefix 2048] [--candidates 64] [--suffix 16]

Floor of an operation: its floating-point operations at the measured peak of a matrix product, or the bytes of weights
and K/V at the measured copy bandwidth, whichever takes longer. Operations count visible pairs only (the triangle, not
the square), and not what the last layer of an `extend` need not compute.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch

from relaygr_stream import settings
from relaygr_stream.models.devices import select_device
from relaygr_stream.models.hstu import StackConfig
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.load import load_model
from relaygr_stream.models.protocol import ScoreInput
from relaygr_stream.models.tokens import Tokens

PEAK_SIZE = 2048  # edge of the product whose rate counts as the peak
COPY_BYTES = 256 << 20  # far larger than any cache
EXTENSION = 64  # tokens by which a cached prefix is extended


def best_ms(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Shortest time of `work`, waited for, over at least five runs and `seconds`: other processes only ever add."""
    best, spent = float("inf"), 0.0
    for run in itertools.count():
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        took = (time.perf_counter() - start) * 1e3
        if run:  # the first one warms up
            best, spent = min(best, took), spent + took
        if run >= 5 and spent >= seconds * 1e3:
            break
    return best


def operations(stack: StackConfig, rows: int, pairs: int, *, last_layer_kv_only: bool) -> float:
    """Floating-point operations of `rows` tokens that see `pairs` (row, column) pairs in each layer."""
    value, key = stack.heads * stack.dv, stack.heads * stack.dqk
    layer = 2 * rows * stack.dim * (5 * value + 2 * key) + 2 * pairs * (value + key)
    last = 2 * rows * stack.dim * (value + key) if last_layer_kv_only else layer
    return float((stack.layers - 1) * layer + last)


def triangle(rows: int) -> int:
    """Pairs of rows that see themselves and the earlier ones."""
    return rows * (rows + 1) // 2


class Bench:
    """One model on one device, and the two ceilings of that device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = select_device(options.device)
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        shape = settings.Model(
            layers=options.layers, dim=options.dim, heads=options.heads, dqk=options.width, dv=options.width
        )
        self.stack = StackConfig(options.layers, options.dim, options.heads, options.width, options.width, 1)
        self.model = load_model(shape, settings.Relay(), device=self.device, dtype=self.dtype)
        self.random = np.random.default_rng(0)
        self.weight_bytes = 7 * options.dim * options.heads * options.width * options.layers * self.dtype.itemsize
        self.peak = self.measure_peak()
        self.bandwidth = self.measure_bandwidth()

    def measure_peak(self) -> float:
        """FLOP/s of a large square product."""
        a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=self.device).to(self.dtype) for _ in range(2))
        out = torch.empty_like(a)
        took = best_ms(lambda: torch.mm(a, b, out=out), self.device, self.options.seconds)
        return 2 * PEAK_SIZE**3 / took * 1e3

    def measure_bandwidth(self) -> float:
        """Bytes/s of a large copy, counting those read and those written."""
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return 2 * COPY_BYTES / best_ms(lambda: target.copy_(source), self.device, self.options.seconds) * 1e3

    def run(self) -> None:
        options = self.options
        print(
            f"{options.device} {options.dtype}, {torch.get_num_threads()} threads: peak {self.peak / 1e9:.1f} GFLOP/s, "
            f"copy {self.bandwidth / 1e9:.1f} GB/s; {options.layers} layers, D {options.dim}, {options.heads} × "
            f"{options.width}"
        )
        print(f"{'operation':44} {'ms':>9} {'floor':>9} {'× floor':>8} {'of peak':>8}")
        for prefix in options.prefix:
            kv = self.region(prefix + EXTENSION)
            whole = self.extensions(kv, prefix)
            for count in options.candidates:
                self.rankings(kv, count, whole)

    def extensions(self, kv: KVRegion, prefix: int) -> float:
        """Times of inferring a prefix and of extending it; leaves the prefix in kv. Milliseconds of the former."""
        history, more = self.tokens(prefix), self.tokens(EXTENSION)

        def extend(start: int, tokens: Tokens) -> None:
            kv.length = start
            self.model.extend(kv, tokens)

        kv_bytes = prefix * self.model.layout.bytes_per_token
        flops = operations(self.stack, prefix, triangle(prefix), last_layer_kv_only=True)
        whole = self.line(f"extend {prefix}", lambda: extend(0, history), flops, kv_bytes)
        pairs = EXTENSION * prefix + triangle(EXTENSION)
        flops = operations(self.stack, EXTENSION, pairs, last_layer_kv_only=True)
        self.line(f"extend {prefix} by {EXTENSION}", lambda: extend(prefix, more), flops, kv_bytes)
        kv.length = prefix
        return whole

    def rankings(self, kv: KVRegion, count: int, whole: float) -> None:
        """Times of scoring `count` candidates against the prefix in kv, which took `whole` milliseconds to infer."""
        prefix, suffix, batch = kv.length, self.options.suffix, self.options.batch
        kv_bytes = prefix * self.model.layout.bytes_per_token
        candidates = self.random.integers(0, 1 << 31, count)
        hit = [ScoreInput(kv, self.tokens(0), candidates)]
        flops = operations(self.stack, count, count * (prefix + 1), last_layer_kv_only=False)
        took = self.line(f"score {count} on a hit of {prefix}", lambda: self.model.score(hit), flops, kv_bytes)
        print(f"    full inference: {(whole + took) / took:.1f} × the hit")
        # The same region eight times: its K and V are read from memory once at least.
        name = f"score {batch} such rankings at once"
        self.line(name, lambda: self.model.score(hit * batch), batch * flops, kv_bytes)
        behind = [ScoreInput(kv, self.tokens(suffix), candidates)]
        pairs = suffix * prefix + triangle(suffix) + count * (prefix + suffix + 1)
        flops = operations(self.stack, count + suffix, pairs, last_layer_kv_only=False)
        self.line(f"score {count} behind a suffix of {suffix}", lambda: self.model.score(behind), flops, kv_bytes)

    def line(self, name: str, work: Callable[[], object], flops: float, kv_bytes: int) -> float:
        """Measure and print one operation; its milliseconds."""
        took = best_ms(work, self.device, self.options.seconds)
        floor = max(flops / self.peak, (self.weight_bytes + kv_bytes) / self.bandwidth) * 1e3
        print(f"{name:44} {took:9.2f} {floor:9.2f} {took / floor:8.2f} {flops / self.peak * 1e5 / took:7.0f}%")
        return took

    def tokens(self, count: int) -> Tokens:
        array = np.empty((3, count), np.int64)
        array[0] = self.random.integers(0, 1 << 31, count)
        array[1] = self.random.integers(0, 4, count)
        array[2] = self.random.integers(0, 1 << 20, count)
        return Tokens(array)

    def region(self, capacity: int) -> KVRegion:
        layout = self.model.layout
        storage = torch.zeros(capacity * layout.elements_per_token, dtype=layout.dtype, device=self.device)
        return KVRegion(layout, storage, capacity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda[:N] or npu[:N]")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one operator")
    parser.add_argument("--prefix", type=int, nargs="+", default=[2048], help="prefix tokens")
    parser.add_argument("--candidates", type=int, nargs="+", default=[64], help="candidates of a ranking")
    parser.add_argument("--suffix", type=int, default=16, help="suffix tokens")
    parser.add_argument("--batch", type=int, default=8, help="rankings scored at once")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="query, key and value width per head")
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Bench(options).run()


if __name__ == "__main__":
    main()
