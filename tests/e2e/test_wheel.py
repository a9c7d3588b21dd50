"""The wheel where no compiler is: its kernels reproduce conformance arrays, and without them torch does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from relaygr_stream.models.native.objects import CPUINFO, OBJECTS, instructions
from tests.unit.models.naive_hstu import arrays_for_kernels
from tests.unit.models.test_conformance import REFERENCE

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]


def run(*command: object, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, env={**os.environ, **options}
    )


class Bare:
    """A virtual environment with a wheel. It borrows the dependencies; PATH has its own programs only."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        made = run(sys.executable, "-m", "venv", "--without-pip", folder)
        assert made.returncode == 0, made.stderr
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")
        # A path named in a .pth file is not searched for further .pth files, so the clone itself is not found.
        (self.site / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))
        installed = run(sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--no-deps", wheel)
        assert installed.returncode == 0, installed.stdout + installed.stderr
        self.package = self.site / "relaygr_stream"
        assert shutil.which("cc", path=str(self.bin)) is None

    def conformance(self, file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / "relaygr"), "model", "conformance", str(file), *arguments]
        environment = {"PATH": str(self.bin), "HOME": str(self.site), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.site.parent, env=environment
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a user builds it, with the build requirements from the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT, REQUIRE_KERNELS="1")
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return Bare(tmp_path_factory.mktemp("bare") / "venv", wheel)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("arrays") / "wide.npz"
    np.savez(file, **arrays_for_kernels())  # type: ignore[arg-type]  # its stub takes the second keyword for allow_pickle
    return file


def test_the_wheel_holds_objects_and_no_sources(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "-py3-none-linux_" in wheel.name
    assert {Path(name).stem for name in names if name.endswith(".so")} == set(OBJECTS)
    assert not [name for name in names if name.endswith((".c", ".h", "CMakeLists.txt"))]


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("avx2", "float32"), ("avx512", "float32"), ("avx512_bf16", "bfloat16"), ("amx", "bfloat16")],
)
def test_each_instruction_set_reproduces_the_arrays(bare: Bare, wide: Path, kernels: str, dtype: str) -> None:
    lacking = set(OBJECTS[kernels]) - instructions(CPUINFO)
    done = bare.conformance(wide, "--dtype", dtype, "--kernels", kernels)
    if lacking:
        assert done.returncode == 1
        assert "this processor has no" in done.stderr
        pytest.skip(f"refused: this processor has no {', '.join(lacking)}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_is_reproduced(bare: Bare) -> None:
    done = bare.conformance(REFERENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_installation_made_without_a_compiler_says_so_in_one_line(tmp_path: Path, wide: Path) -> None:
    options = ["--no-deps", "--no-build-isolation"]  # what it is built with is here, and does not compile
    built = run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", tmp_path, ROOT, CC="no-such-compiler")
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    done = Bare(tmp_path / "venv", wheel).conformance(wide)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "native layers unavailable" in line]
    if set(OBJECTS["avx2"]) <= instructions(CPUINFO):
        assert len(said) == 1
        assert "without a C compiler" in said[0]
    else:
        assert said == []
