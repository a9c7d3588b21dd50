"""Counts the words of README.md and of the pages below docs/.

    python docs/words.py            a line a page, and the sum
    python docs/words.py --check    exits 1 where the sum is above MOST (make check)

A word stands between white space and has a letter or a digit, so the bars and rules of tables are none. Words in
examples and in tables count. What generate.py fills in is in no file, and CHANGELOG.md is no page.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
#: Of all pages together: about three hours for somebody who reads every word.
MOST: Final = 40_000


def words(page: Path) -> int:
    """The words of one page."""
    return sum(any(map(str.isalnum, word)) for word in page.read_text(encoding="utf-8").split())


def main() -> int:
    """Print the counts; the exit code."""
    counts = {str(page.relative_to(ROOT)): words(page) for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))}
    for page, count in sorted(counts.items()):
        print(f"{count:7,} {page}")
    total = sum(counts.values())
    print(f"{total:7,} in all, at most {MOST:,}")
    return int("--check" in sys.argv and total > MOST)


if __name__ == "__main__":
    sys.exit(main())
