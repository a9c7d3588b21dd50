"""Builds the kernels in C into the wheel, by CMake; hatchling calls it (pyproject.toml).

An editable installation gets them beside their sources. Without a working C compiler there are none, and the wheel is
one for every platform; with REQUIRE_KERNELS=1 in the environment the build then fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS: Final = "relaygr_stream/models/native"
REQUIRED: Final = "REQUIRE_KERNELS"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles KERNELS, and names each object to hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """hatchling calls it before it packs. Raises CalledProcessError if a kernel does not compile."""
        self._temporary = tempfile.TemporaryDirectory(prefix="relaygr-kernels-")
        folder = self._temporary.name
        configured = self._cmake("-G", "Ninja", "-S", KERNELS, "-B", folder)
        if configured and os.environ.get(REQUIRED):
            raise RuntimeError(f"{REQUIRED} is set, but there is no working C compiler (above): install one, or set CC")
        if configured:
            self.app.display_warning("no working C compiler: built without kernels, torch operators will compute")
            return
        if self._cmake("--build", folder):
            raise RuntimeError("a kernel does not compile (above)")
        objects = sorted(Path(folder).glob("*.so"))
        for built in objects:
            if version == "editable":
                fresh = Path(self.root, KERNELS, f"{built.name}.new")
                shutil.copy(built, fresh)
                fresh.replace(fresh.with_suffix(""))  # never written over: a running process may have loaded it
            else:
                build_data["force_include"][str(built)] = f"{KERNELS}/{built.name}"
        if objects:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")

    def finalize(self, *_: Any) -> None:
        """hatchling calls it when the wheel is packed."""
        self._temporary.cleanup()

    def _cmake(self, *arguments: str) -> int:
        return subprocess.run(["cmake", *arguments], cwd=self.root, check=False).returncode
