"""How close the built-in model comes to the machine: every time beside its floor, all measured in one run.

    python benchmarks/model.py [--device cpu] [--dtype bfloat16] [--prefix 2048] [--candidates 64] [--suffix 16]

Floor of an operation: its floating-point operations at the measured peak of a matrix product, or the bytes of weights
and K/V at the measured copy bandwidth, whichever takes longer. Operations count visible pairs only (the triangle, not
the square), and not what the last layer of an `extend` need not compute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from relaygr_stream import settings
from relaygr_stream.models.devices import select_device
from relaygr_stream.models.hstu import StackConfig
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.load import load_model
from relaygr_stream.models.protocol import ScoreInput
from relaygr_stream.models.tokens import Tokens

PEAK_SIZE = 2048  # edge of the product whose rate counts as the peak
COPY_BYTES = 256 << 20  # far larger than any cache


def median_ms(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median time of `work`, waited for, over at least five runs and `seconds`."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) * 1e3

    once()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds * 1e3:
        times.append(once())
    return statistics.median(times)


def operations(stack: StackConfig, rows: int, pairs: int, *, last_layer_kv_only: bool) -> float:
    """Floating-point operations of `rows` tokens that see `pairs` (row, column) pairs in each layer."""
    value, key = stack.heads * stack.dv, stack.heads * stack.dqk
    layer = 2 * rows * stack.dim * (5 * value + 2 * key) + 2 * pairs * (value + key)
    last = 2 * rows * stack.dim * (value + key) if last_layer_kv_only else layer
    return float((stack.layers - 1) * layer + last)


class Bench:
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
        weights = options.dim * options.heads * options.width * 7 * options.layers
        self.weight_bytes = weights * self.dtype.itemsize

    def peak(self) -> float:
        """FLOP/s of a large square product: the best of several, since nothing may seem to exceed it."""
        a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=self.device).to(self.dtype) for _ in range(2))
        out = torch.empty_like(a)
        best = min(median_ms(lambda: torch.mm(a, b, out=out), self.device, 0.3) for _ in range(3))
        return 2 * PEAK_SIZE**3 / best * 1e3

    def bandwidth(self) -> float:
        """Bytes/s of a large copy, read and written."""
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return 2 * COPY_BYTES / median_ms(lambda: target.copy_(source), self.device, 0.3) * 1e3

    def tokens(self, count: int) -> Tokens:
        array = np.empty((3, count), np.int64)
        array[0] = self.random.integers(0, 1 << 31, count)
        array[1] = self.random.integers(0, 4, count)
        array[2] = self.random.integers(0, 1 << 20, count)
        return Tokens(array)

    def region(self, capacity: int) -> KVRegion:
        layout: KVLayout = self.model.layout
        storage = torch.zeros(capacity * layout.elements_per_token, dtype=layout.dtype, device=self.device)
        return KVRegion(layout, storage, capacity)

    def run(self) -> None:
        options, model = self.options, self.model
        peak, bandwidth = self.peak(), self.bandwidth()
        print(
            f"{options.device} {options.dtype}, {torch.get_num_threads()} threads: peak {peak / 1e9:.1f} GFLOP/s, "
            f"copy {bandwidth / 1e9:.1f} GB/s; {options.layers} layers, D {options.dim}, {options.heads} × "
            f"{options.width}"
        )
        print(f"{'operation':44} {'ms':>9} {'floor':>9} {'× floor':>8} {'of peak':>8}")

        def line(name: str, work: Callable[[], object], flops: float, moved: float) -> float:
            took = median_ms(work, self.device, options.seconds)
            floor = max(flops / peak, moved / bandwidth) * 1e3
            print(f"{name:44} {took:9.2f} {floor:9.2f} {took / floor:8.2f} {flops / peak * 1e5 / took:7.0f}%")
            return took

        for prefix in options.prefix:
            kv_bytes = prefix * model.layout.bytes_per_token
            kv, history = self.region(prefix + 256), self.tokens(prefix)
            none, more = self.tokens(0), self.tokens(64)
            model.extend(kv, history)

            def extend(kv: KVRegion, start: int, tokens: Tokens) -> None:
                kv.length = start
                model.extend(kv, tokens)

            def flops(rows: int, seen: int) -> float:
                """Of rows that see `seen` columns before the first of them, and each other causally."""
                pairs = rows * seen + rows * (rows + 1) // 2
                return operations(self.stack, rows, pairs, last_layer_kv_only=True)

            whole = line(
                f"extend {prefix}", lambda: extend(kv, 0, history), flops(prefix, 0), self.weight_bytes + kv_bytes
            )
            line(
                f"extend {prefix} by 64",
                lambda: extend(kv, prefix, more),
                flops(64, prefix),
                self.weight_bytes + kv_bytes,
            )
            kv.length = prefix
            for count in options.candidates:
                suffix = self.tokens(options.suffix)
                candidates = self.random.integers(0, 1 << 31, count)
                hit = [ScoreInput(kv, none, candidates)]
                batch = hit * options.batch
                score_flops = operations(self.stack, count, count * (prefix + 1), last_layer_kv_only=False)
                name = f"score {count} on a hit of {prefix}"
                took = line(name, lambda: model.score(hit), score_flops, self.weight_bytes + kv_bytes)
                print(f"{'':4}full inference: {(whole + took) / took:.1f} × the hit")
                line(
                    f"{options.batch} such rankings at once",
                    lambda: model.score(batch),
                    options.batch * score_flops,
                    self.weight_bytes + kv_bytes,
                )
                with_suffix = [ScoreInput(kv, suffix, candidates)]
                s = options.suffix
                suffix_pairs = s * prefix + s * (s + 1) // 2 + count * (prefix + s + 1)
                line(
                    f"score {count} behind a suffix of {s}",
                    lambda: model.score(with_suffix),
                    operations(self.stack, count + s, suffix_pairs, last_layer_kv_only=False),
                    self.weight_bytes + kv_bytes,
                )


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
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Bench(options).run()


if __name__ == "__main__":
    main()
