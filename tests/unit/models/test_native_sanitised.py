"""The property tests of the functions in C once more, compiled with AddressSanitizer and UBSan.

Each tensor is an allocation of its own there, so reading or writing beside one ends the run. NaN behind `kv.length`,
which no sanitiser sees, is part of the properties.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from relaygr_stream.models.native.objects import OBJECTS
from tests.unit.models.built_kernels import build_kernels

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86 CPU"),
]

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
#: The kernels for AMX run in software; a test's own compiler run takes its flags from CFLAGS.
TESTS = ("test_native_layers.py", "test_native_ends.py")
#: About the objects of the clone.
OTHERS = "--deselect=tests/unit/models/test_native_layers.py::test_the_objects_are_those_of_the_sources"
RUN = """
import sys
from pathlib import Path

import pytest
from relaygr_stream.models.native import objects

objects.FOLDER = Path(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


def sanitised(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process with the sanitisers' library, on the objects in `folder`."""
    library = subprocess.run(
        [os.environ.get("CC", "cc"), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
        "PYTHONMALLOC": "malloc",
        "CFLAGS": FLAGS,
    }
    command = [sys.executable, "-c", RUN, str(folder), "-q", "-s", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_properties_hold_and_no_byte_beside_a_tensor_is_touched() -> None:
    folder = Path(__file__).parent
    done = sanitised(build_kernels(FLAGS, *OBJECTS), OTHERS, *(str(folder / name) for name in TESTS))
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert "passed" in done.stdout
