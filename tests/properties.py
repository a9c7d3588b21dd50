"""How many examples a property gets: an eighth of them in make test, all in make test-long and make test-repeat."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

#: The profile with all examples, and new ones in each run.
WHOLE: Final = "search"
PART: Final = 8
#: Below this, the first examples, which are the simplest, are most of them.
LEAST: Final = 8


def examples(number: int) -> int:
    """max_examples of a property that gets `number` of them where there is time."""
    if settings.get_current_profile_name() == WHOLE:
        return number
    return min(number, max(LEAST, number // PART))
