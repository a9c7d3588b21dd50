"""One name, one class: a name that stands twice in the serving package makes every search answer for two."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
PACKAGE = Path(__file__).parents[2] / "relaygr_stream"
#: A command and its message, the two outboxes, an in-flight call and a queued ranking, and names of public schemas.
TWICE = {"Cancel", "History", "Outbox", "Rank", "Ranking"}


def test_no_further_name_stands_for_two_classes() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in CLASS.findall(file.read_text(encoding="utf-8")):
            places[name].append(str(file.relative_to(PACKAGE)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert len(places) > 300
    assert twice.keys() <= TWICE, twice
