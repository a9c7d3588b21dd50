"""The kernels compiled again for the tests, with further flags."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from relaygr_stream.models import native

SOURCES = Path(native.__file__).parent
#: What was built stays here; only what has changed is compiled again.
BUILT = Path(__file__).parents[3] / ".cache" / "kernels"


def build_kernels(flags: str, *targets: str) -> Path:
    """The folder of the objects `targets`, or of all, compiled with `flags` and CFLAGS. Needs a C compiler."""
    flags = f"{os.environ.get('CFLAGS', '')} {flags}".strip()
    folder = BUILT / hashlib.sha256(flags.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None, "no cmake: make setup installs it"
    # A sanitiser that is loaded into the tests would be loaded into the compiler, too, and libtsan ends it.
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    with (folder / "lock").open("w") as lock:  # tests in parallel build at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        for arguments in (
            ["-S", str(SOURCES), "-B", str(folder), f"-DCMAKE_C_FLAGS={flags}"],
            ["--build", str(folder), *(["--target", *targets] if targets else [])],
        ):
            done = subprocess.run([cmake, *arguments], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder
