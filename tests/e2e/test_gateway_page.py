"""The gateway's /docs in headless Chromium, without any other host: it draws each verb, and sends what is typed."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path

import pytest

from relaygr_stream.settings.schema import Kafka
from tests import needs
from tests.browser import browser
from tests.unit.client_peers import responder_on
from tests.unit.gateway.doors import TOKEN, door_on
from tests.waiting import until

pytestmark = pytest.mark.stack
RANKED_BY_CURL = (
    """{"user_id": "o'hara", "history": {"items": [5], "actions": [1], "times": [100]}, "candidates": [7]}"""
)


async def test_the_page_works_without_the_internet(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings) as door, browser(tmp_path) as page:
        home = f"http://127.0.0.1:{door.port}/"
        await page.go(f"{home}docs")
        await page.until("return document.body.dataset.drawn")
        verbs = await page.run("return [...document.querySelectorAll('h2 code')].map((each) => each.textContent)")
        assert verbs == ["POST /v1/announce", "POST /v1/rank", "DELETE /v1/requests/{request_id}"]
        loaded = await page.run("return performance.getEntriesByType('resource').map((each) => each.name)")
        assert [url for url in loaded if not url.startswith(home)] == []

        send = "document.querySelector('#{} button').click()"
        shown = "return document.querySelector('#{} pre.answer').textContent"
        await page.run(send.format("post-rank"))
        assert (await page.until(shown.format("post-rank"))).startswith("401")
        await page.run("document.getElementById('token').value = arguments[0]", TOKEN)
        await page.run("document.querySelector('#post-rank pre.answer').textContent = ''")
        await page.run(send.format("post-rank"))
        answer = await page.until(shown.format("post-rank"))
        assert answer.startswith("200"), answer
        assert json.loads(answer.partition("\n")[2])["tasks"] == ["click", "like"]
        assert peer.requests[0][1].user_id == "user-17"

        await page.run("document.querySelector('#delete-requests input[name=request_id]').value = 'a/b'")
        await page.run("document.querySelector('#delete-requests input[name=user_id]').value = 'u'")
        await page.run(send.format("delete-requests"))
        assert (await page.until(shown.format("delete-requests"))).startswith("204")
        await until(lambda: peer.cancels, "cancelled")
        assert peer.cancels[0].request_id == "a/b"

        # The line below is what curl sends, quotes included.
        await page.run("document.querySelector('#post-rank textarea').value = arguments[0]", RANKED_BY_CURL)
        await page.run(
            "document.querySelector('#post-rank textarea').dispatchEvent(new Event('input', {bubbles: true}))"
        )
        line = await page.run("return document.querySelector('#post-rank pre.curl').textContent")
        assert "Bearer TOKEN" in line
        assert TOKEN not in line
        needs.programs("curl")
        asked = await asyncio.create_subprocess_exec(
            *shlex.split(line.replace("Bearer TOKEN", f"Bearer {TOKEN}")), "-s", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asked.communicate()
        assert json.loads(out)["tasks"] == ["click", "like"]
        assert peer.requests[-1][1].user_id == "o'hara"
        example = json.loads(await page.run("return document.querySelector('#post-rank pre.example').textContent"))
        assert example.keys() == json.loads(answer.partition("\n")[2]).keys()
        assert "`" not in await page.run("return document.body.innerText")
        for width in (1280, 390):
            for dark in (False, True):
                await page.show_as(width, dark=dark)
                assert await page.run("return document.documentElement.scrollWidth") <= width
                (tmp_path / f"api-{width}-{dark}.png").write_bytes(await page.screenshot())
        errors = [line for line in await page.console() if not line.startswith("DEBUG")]
        assert all("401" in line for line in errors), errors  # of what was tried without a token
