"""Device selection. No NPU is at hand: torch_npu is stood in for up to its boundary, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from relaygr_stream.errors import DeviceError
from relaygr_stream.models.devices import select_device

REPOSITORY = Path(__file__).parents[3]

#: What torch_npu does as it is imported, as far as selecting a device goes: register itself behind PrivateUse1.
FAKE_NPU = """
import types
import torch
torch.utils.rename_privateuse1_backend("npu")
module = types.ModuleType("npu")
module.is_available = lambda: True
module.device_count = lambda: 2
torch._register_device_module("npu", module)
"""
#: In a process of its own: two seconds of a core.
imports_torch_anew = pytest.mark.stack
NO_CANN = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")'


def in_a_process(program: str, folder: Path, **environ: str) -> str:
    """What `program` prints, with `folder` before everything else on the path."""
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_DEVICE")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False,
        env=environment | {"PYTHONPATH": path} | environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def install_torch_npu(folder: Path, source: str) -> None:
    """A torch_npu that torch loads by itself, as the real one."""
    (folder / "torch_npu.py").write_text(f"{source}\ndef _autoload(): ...\n")
    info = folder / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


SELECT = """
    import sys
    from relaygr_stream.errors import DeviceError
    from relaygr_stream.models.devices import select_device
    for name in {}:
        try:
            print(select_device(name), "torch_npu" in sys.modules)
        except DeviceError as error:
            print("DeviceError:", error)
"""


def select(folder: Path, *names: str, **environ: str) -> list[str]:
    """For each device in turn, what `select_device` gives and whether torch_npu is loaded by then, or its error."""
    return in_a_process(SELECT.format(names), folder, **environ).splitlines()


def test_cpu() -> None:
    assert select_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "npu:1:2"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(DeviceError, match="write cpu, cuda, cuda:N, npu or npu:N"):
        select_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_cuda_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"finds no cuda device; install a CUDA build .* or set worker\.device"):
        select_device("cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    assert select_device("cuda") == torch.device("cuda:0")
    with pytest.raises(DeviceError, match="cuda devices, numbered from 0"):
        select_device("cuda:99")


@imports_torch_anew
def test_npu_without_torch_npu(tmp_path: Path) -> None:
    (said,) = select(tmp_path, "npu")
    assert "torch_npu is not installed; install the extra `npu`" in said


@imports_torch_anew
def test_torch_npu_without_cann_is_said_in_words_and_keeps_no_cpu_worker_from_starting(tmp_path: Path) -> None:
    install_torch_npu(tmp_path, NO_CANN)
    cpu, npu = select(tmp_path, "cpu", "npu:0")
    assert cpu == "cpu False"
    assert npu.startswith("DeviceError: device npu: torch_npu cannot be loaded: libhccl.so")
    assert "install CANN and source its set_env.sh" in npu
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in npu


@imports_torch_anew
def test_where_torch_was_told_to_load_it_the_failure_is_said_in_words(tmp_path: Path) -> None:
    install_torch_npu(tmp_path, NO_CANN)
    (said,) = select(tmp_path, "cpu", TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert said.startswith("DeviceError: torch cannot be imported")
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said


@imports_torch_anew
def test_npu_up_to_the_device_boundary_and_torch_npu_only_when_chosen(tmp_path: Path) -> None:
    install_torch_npu(tmp_path, FAKE_NPU)
    assert select(tmp_path, "cpu", "npu", "npu:1", "npu:2") == [
        "cpu False",
        "npu:0 True",
        "npu:1 True",
        "DeviceError: device 'npu:2': there are 2 npu devices, numbered from 0",
    ]


def test_the_module_itself_does_not_import_torch(tmp_path: Path) -> None:
    program = "import sys, relaygr_stream.models.devices; print('torch' in sys.modules)"
    assert in_a_process(program, tmp_path) == "False"
