"""How every benchmark ends: with the targets missed, one a line, and with exit code 1 where CHECK=1 asks for that."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def end(missed: Sequence[str]) -> None:
    """Print them, and leave the process with 1 where they count. Comes last: nothing behind it runs then."""
    for target in missed:
        print(f"missed: {target}")
    if missed and os.environ.get("CHECK") == "1":
        sys.exit(1)
