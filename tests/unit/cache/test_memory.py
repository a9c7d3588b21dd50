"""One tier's memory: aligned, shared views, and refusals that name the numbers."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from relaygr_stream.cache import host
from relaygr_stream.cache.host import available_host_bytes
from relaygr_stream.cache.memory import ALIGNMENT, TierMemory
from relaygr_stream.errors import CapacityError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]


def test_the_buffer_is_aligned_and_as_large_as_the_arena() -> None:
    tier = TierMemory(10 * ALIGNMENT + 17, CPU)
    assert tier.buffer.data_ptr() % ALIGNMENT == 0
    assert tier.buffer.nbytes == tier.arena.size == 10 * ALIGNMENT
    assert not tier.buffer.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_an_extent_share_its_bytes_and_no_others(dtype: torch.dtype) -> None:
    tier = TierMemory(4 * ALIGNMENT, CPU)
    extents = [tier.arena.allocate(ALIGNMENT) for _ in range(4)]
    assert extents[1] is not None
    view = tier.view(extents[1], dtype)
    assert view.dim() == 1 and view.dtype == dtype
    assert view.nbytes == ALIGNMENT
    view.fill_(1)
    assert tier.view(extents[1], torch.uint8).any()
    for other in (0, 2, 3):
        extent = extents[other]
        assert extent is not None
        assert not tier.view(extent, torch.uint8).any()


def test_memory_is_taken_as_it_is_written() -> None:
    """A worker of the trial profile took 3.4 GB at its start."""
    process, size = psutil.Process(), 512 << 20
    before = process.memory_info().rss
    tier = TierMemory(size, CPU)
    assert process.memory_info().rss - before < size // 8
    written = tier.arena.allocate(size // 4)
    assert written is not None
    tier.view(written, torch.float32).fill_(1.0)
    assert size // 8 < process.memory_info().rss - before < size // 2


def test_a_tier_of_nothing_holds_nothing() -> None:
    tier = TierMemory(0, CPU)
    assert tier.arena.allocate(1) is None
    assert tier.buffer.nbytes == 0


def test_more_than_the_host_has_is_refused_before_it_is_touched() -> None:
    with pytest.raises(CapacityError, match=r"worker\.hbm_bytes = 1152921504606846976 bytes, but the host has \d+"):
        TierMemory(1 << 60, CPU, setting="worker.hbm_bytes")


def test_pinned_memory_counts_as_the_power_of_two_that_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_host_bytes", lambda: 200 * ALIGNMENT)
    TierMemory(129 * ALIGNMENT, CPU)
    with pytest.raises(
        CapacityError,
        match=rf"worker\.dram_bytes = {129 * ALIGNMENT} bytes, and torch pins {256 * ALIGNMENT}, the next",
    ):
        TierMemory(129 * ALIGNMENT, CPU, pinned=True, setting="worker.dram_bytes")


def test_what_the_allocator_refuses_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_host_bytes", lambda: None)  # a host that does not say
    with pytest.raises(CapacityError, match=r"worker\.dram_bytes = 1152921504606846976 bytes: cpu refused"):
        TierMemory(1 << 60, CPU, setting="worker.dram_bytes")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        (MEMINFO, 1000 * 1024),
        (MEMINFO | {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}, 1000 * 1024),
        (MEMINFO | {"sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "2000\n"}, 3000),
        (
            MEMINFO
            | {
                "sys/fs/cgroup/memory.max": "5000\n",
                "sys/fs/cgroup/memory.current": "4000\n",
                "sys/fs/cgroup/memory.stat": "anon 7\ninactive_file 3000\n",
            },
            4000,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "900\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "600\n",
            },
            300,
        ),
    ],
)
def test_what_is_available_is_the_least_of_host_and_control_group(
    tmp_path: Path, files: dict[str, str], available: int | None
) -> None:
    assert available_host_bytes(write(tmp_path, files)) == available
