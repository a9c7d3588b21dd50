"""The property tests of the functions in C once more, compiled with AddressSanitizer and UBSan, or ThreadSanitizer.

With the first, each tensor is an allocation of its own, so reading or writing beside one ends the run. NaN behind
`kv.length`, which no sanitiser sees, is part of the properties. The last sees the accesses of the functions in C alone.
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
THREAD_FLAGS = "-fsanitize=thread -g"
#: The kernels for AMX run in software; a test's own compiler run takes its flags from CFLAGS.
TESTS = ("test_native_layers.py", "test_native_ends.py", "test_native_team.py")
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


def sanitised(flags: str, library: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process with the sanitisers' `library`, on objects compiled with `flags`."""
    preloaded = subprocess.run(
        [os.environ.get("CC", "cc"), f"-print-file-name={library}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 exitcode=66",
        "PYTHONMALLOC": "malloc",
        "CFLAGS": flags,
    }
    # ThreadSanitizer wants addresses where they are without randomisation.
    command = [
        *("setarch", "-R", sys.executable, "-c", RUN, str(build_kernels(flags, *OBJECTS))),
        *("-q", "-s", "-p", "no:cacheprovider", *arguments),
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_properties_hold_and_no_byte_beside_a_tensor_is_touched() -> None:
    folder = Path(__file__).parent
    done = sanitised(FLAGS, "libasan.so", OTHERS, *(str(folder / name) for name in TESTS))
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert "passed" in done.stdout


def test_no_two_threads_touch_the_same_bytes() -> None:
    team = Path(__file__).with_name("test_native_team.py")
    done = sanitised(THREAD_FLAGS, "libtsan.so", "-k", "no_bit or at_the_same_time", str(team))
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert "passed" in done.stdout
