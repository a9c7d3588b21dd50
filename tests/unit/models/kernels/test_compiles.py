"""The kernels compile for GPUs that need not be here, into the instructions that they were written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.kernels.interpreter import HINT
from tests.waiting import WITHIN_S

pytest.importorskip("triton", reason=HINT)

#: dtype, head width, compute capability, and whether rows are cut along their columns.
KERNELS = (
    "bfloat16:64:80:whole",
    "bfloat16:128:86:whole",
    "bfloat16:256:80:split",
    "bfloat16:64:90:split",
    "bfloat16:128:90:split",
    "float32:64:90:split",
)
pytestmark = pytest.mark.stack  # a compiler run of each kernel for each GPU: 16 s of a core


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """In a process without the interpreter. What `make test` compiled before is taken from its cache, by content."""
    cache = os.environ.get("TRITON_CACHE_DIR") or str(tmp_path_factory.mktemp("triton"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.models.kernels.compile_kernels", *KERNELS],
        cwd=Path(__file__).parents[4], env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(KERNELS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_it_fits_its_gpu_and_spills_nothing(compiled: dict[str, list[dict[str, Any]]], name: str) -> None:
    for kernel in compiled[name]:
        assert kernel["shared"] <= kernel["allowed"]
        assert kernel["local"] == 0


@pytest.mark.parametrize("name", KERNELS)
def test_half_precision_runs_on_tensor_cores_and_float32_in_full(
    compiled: dict[str, list[dict[str, Any]]], name: str
) -> None:
    attention = compiled[name][0]
    assert (attention["matrix"] > 0) == (not name.startswith("float32"))
    assert attention["tf32"] == 0


@pytest.mark.parametrize("name", KERNELS)
def test_keys_and_values_are_loaded_16_bytes_at_a_time(compiled: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert compiled[name][0]["wide_loads"] > 0
    assert compiled[name][0]["narrow_loads"] == 0
