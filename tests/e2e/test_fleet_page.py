"""The fleet's page in headless Chromium: its numbers are those of /metrics, it fits a telephone, and it is live."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.messages import HITS
from tests.browser import Browser, browser
from tests.e2e.fleet import LONG_LIVED, Fleet, traffic
from tests.e2e.test_gateway import ask
from tests.unit.status.test_tally import buckets_of, histogram_quantile

pytestmark = pytest.mark.stack
RANKINGS = 12  # relayed, and as many in full
STEPS = (
    "return [...document.querySelectorAll('#traced tr')].map((row) => [...row.cells].map((each) => each.textContent))"
)
VALUES = "return Object.fromEntries([...document.querySelectorAll('data')].map((each) => [each.id, each.value]))"


async def ranked(port: int, fleet: Fleet) -> str:
    """Announced and ranked, and ranked in full; the last request's id."""
    items, actions, times = (array.tolist() for array in traffic(9, rate=1)[0].request.prefix.arrays())
    body = {"user_id": "u", "history": {"items": items, "actions": actions, "times": times}}
    for _ in range(RANKINGS):  # of one user: the budget of a lane that was asked for nothing lately is small
        announced = {**body, "candidates": 3, "rank_in_ms": 10_000}  # none is too late, however slow the machine
        request_id = (await ask(port, "POST", "/v1/announce", announced))["request_id"]
        await fleet.announced(request_id)
        rank = {**body, "candidates": [11, 12, 13]}
        await ask(port, "POST", "/v1/rank", {**rank, "request_id": request_id})
        await ask(port, "POST", "/v1/rank", {**rank, "mode": "full"})
    return str(request_id)


def stated(fleet: Fleet) -> dict[str, float | None]:
    """What the page must say, by the names of its numbers, from /metrics of the worker and the trigger."""
    samples = fleet.children["w1"].samples()

    def value(name: str, **labels: str) -> float:
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())

    answers = "relaygr_answers_total"
    said: dict[str, float | None] = {
        "rankings": value(answers),
        "slo-15": 100 * value("relaygr_rankings_within_slo_total") / value(answers),
        "hbm": 100 * value("relaygr_hbm_bytes", kind="used") / value("relaygr_hbm_bytes", kind="budget"),
        "dram": 100 * value("relaygr_dram_bytes", kind="used") / value("relaygr_dram_bytes", kind="budget"),
    }
    for outcome in (*HITS, "full", "truncated"):
        if count := value(answers, outcome=outcome):
            said[f"count-{outcome}"] = count
    for kind, outcomes in (("relay", HITS), ("full", ("full", "truncated"))):
        for share in (0.5, 0.99):
            found = histogram_quantile(share, buckets_of(samples, outcomes))
            said[f"p{100 * share:.0f}-{kind}-15"] = None if found is None else 1e3 * found
    for each in fleet.children["trigger"].samples():
        if each.name == "relaygr_trigger_decisions_total" and each.labels["reason"] == "admitted":
            said["count-admitted"] = each.value
    return said


async def shows(page: Browser, fleet: Fleet) -> dict[str, Any]:
    """Wait until the page says what /metrics says; a status and the page's refresh lie between."""
    while True:
        said, shown = await asyncio.to_thread(stated, fleet), await page.run(VALUES)
        wrong = {name: (shown.get(name), value) for name, value in said.items() if not same(shown.get(name), value)}
        if not wrong:
            return shown  # type: ignore[no-any-return]
        print(wrong)  # shown where the test times out
        await asyncio.sleep(0.5)


def same(text: str | None, value: float | None) -> bool:
    return (text in ("", None)) if value is None else bool(text) and float(text or 0) == pytest.approx(value)


@asynccontextmanager
async def dashboard(folder: Path) -> AsyncIterator[str]:
    """`relaygr dashboard` for the fleet of this folder; its address. Ends in order on Ctrl-C."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relaygr_stream", "dashboard", "--config", str(folder / "settings.toml"), "--port=0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"stopped\n")


async def test_the_page_says_what_the_metrics_say_and_is_live(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with Fleet(embedded_settings, tmp_path) as fleet, browser(tmp_path) as page:
        fleet.use(msgspec.structs.replace(fleet.settings, relay=LONG_LIVED))
        (port,) = free_ports(1)
        fleet.start("gateway", "gateway", f"gateway.port={port}")
        fleet.start("trigger", "trigger")
        fleet.start("worker", "w1")
        await fleet.ready("trigger", "w1", "gateway")
        await fleet.lanes_settled("w1")
        await fleet.owners_known()

        await page.go(f"http://127.0.0.1:{port}/")
        request_id = await ranked(port, fleet)
        async with asyncio.timeout(60):
            shown = await shows(page, fleet)
        assert float(shown["rankings"]) == 2 * RANKINGS
        assert await page.run("return document.querySelector('#workers tbody td').textContent") == "w1"
        await page.until("return document.querySelectorAll('.chart path').length >= 5")  # ten seconds are over
        loaded = await page.run("return performance.getEntriesByType('resource').map((each) => each.name)")
        assert {url for url in loaded if url.startswith("http")} == {f"http://127.0.0.1:{port}/live"}

        backs = set()
        for width in (1280, 390):
            for dark in (False, True):
                await page.show_as(width, dark=dark)
                assert await page.run("return document.documentElement.scrollWidth") <= width
                backs.add(await page.run("return getComputedStyle(document.body).backgroundColor"))
                shot = tmp_path / f"fleet-{width}-{'dark' if dark else 'light'}.png"
                shot.write_bytes(await page.screenshot())
        assert len(backs) == 2
        assert await page.console() == []

        async with dashboard(tmp_path) as url:
            for where in (f"http://127.0.0.1:{port}/", url):
                await page.go(f"{where}trace?id={request_id}")
                steps = await page.run(STEPS)
                assert [what for what, *_ in steps] == ["announced", "admitted", "ranking asked", "answered ok"], steps
                assert "outcome hbm" in steps[-1][2] or "outcome joined" in steps[-1][2]
                assert "worker w1" in steps[-1][2]
                assert await page.run("return document.querySelector('details').open")
            shot = tmp_path / "trace.png"
            shot.write_bytes(await page.screenshot())
            await page.go(f"{url}trace?id=nobody")
            assert "Nothing was found" in await page.run("return document.querySelector('details').textContent")
            await page.go(url)
            async with asyncio.timeout(60):
                await shows(page, fleet)  # the log of statuses has what was answered before it started
            assert await page.console() == []

        await page.go(f"http://127.0.0.1:{port}/")
        fleet.children["w1"].terminate()  # what follows, the page shows without being loaded again
        assert "no worker is ready" in await page.until("return document.querySelector('#odd .urgent')?.textContent")
        fleet.children["gateway"].terminate()
        await page.until("return !document.getElementById('lost').hidden")
        assert "is old" in await page.run("return document.getElementById('lost').textContent")
