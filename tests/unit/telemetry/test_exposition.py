"""What /metrics answers, rendered once a second at most."""

from __future__ import annotations

import gzip

from prometheus_client import CollectorRegistry, Counter, Gauge

from relaygr_stream.telemetry.exposition import FRESH_S, MAX_PARTS, Exposition
from relaygr_stream.telemetry.pages import Page

OPEN = "application/openmetrics-text;version={};escaping={}"


class Counted:
    """A registry that counts how often its numbers are collected."""

    def __init__(self) -> None:
        self.now = 0.0
        self.collected = 0
        registry = CollectorRegistry()
        self.things = Counter("things", "Things.", registry=registry)
        Gauge("others", "Others.", registry=registry).set_function(self._collect)
        self._exposition = Exposition(registry)

    def page(self, query: str, accept: str, accept_encoding: str) -> Page:
        return self._exposition.page(query, accept, accept_encoding, self.now)

    def _collect(self) -> float:
        self.collected += 1
        return 0.0


def test_a_loop_of_scrapes_renders_one_page_a_second() -> None:
    counted = Counted()
    for turn in range(3):
        counted.now = turn * FRESH_S
        counted.things.inc()
        pages = [counted.page("", "", "") for _ in range(100)]
        assert b"things_total %d.0\n" % (turn + 1) in pages[0][2]
        assert pages == pages[:1] * 100
        assert counted.collected == turn + 1


def test_no_header_and_no_query_makes_it_render_more_than_a_few() -> None:
    counted = Counted()
    for each in range(200):
        counted.page(f"debug={each}", OPEN.format(f"1.{each}.0", "dots"), f"gzip;q=0.{each}")
        counted.page(f"name[]=others&name[]=n{each}", f"text/plain;version=1.0.{each};escaping={each}", f"br{each}")
        counted.page(f"x={each}", OPEN.format("1.0.0", f"e{each}"), "identity")
    assert counted.collected <= 8 + MAX_PARTS


def test_parts_beyond_the_bound_wait_and_whole_pages_do_not() -> None:
    counted = Counted()
    parts = [counted.page(f"name[]=things_total&x={each}", "", "") for each in range(MAX_PARTS + 1)]
    assert [status[:3] for status, _, _ in parts] == ["200"] * MAX_PARTS + ["429"]
    assert ("Retry-After", "1") in parts[-1][1]
    assert b"others" not in parts[0][2]
    whole, zipped = counted.page("", "", ""), counted.page("", "", "gzip")
    assert b"others" in whole[2]
    assert gzip.decompress(zipped[2]) == whole[2]
    counted.now = FRESH_S
    assert counted.page("name[]=others&x=new", "", "")[0] == "200 OK"
