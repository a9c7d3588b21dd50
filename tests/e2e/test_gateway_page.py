"""The gateway's /docs in headless Chromium, without any other host: it draws each verb, and sends what is typed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.settings.schema import Kafka
from tests import needs
from tests.unit.client_peers import responder_on
from tests.unit.gateway.doors import TOKEN, door_on
from tests.waiting import WITHIN_S, until

pytestmark = pytest.mark.stack
#: No name but this machine's own has an address: what a page loads from elsewhere fails.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"


class Browser:
    """A session of chromedriver, by the W3C protocol."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}/session"

    async def open(self, folder: Path) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", OFFLINE]
        options = {"goog:chromeOptions": {"args": arguments}}
        made = await self._post("", {"capabilities": {"alwaysMatch": options}})
        self.base += f"/{made['sessionId']}"

    async def go(self, url: str) -> None:
        await self._post("/url", {"url": url})

    async def run(self, script: str, *arguments: object) -> Any:
        """What a script returns in the page."""
        return await self._post("/execute/sync", {"script": script, "args": list(arguments)})

    async def until(self, script: str) -> Any:
        """The first result of a script that is true."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                if found := await self.run(script):
                    return found
                await asyncio.sleep(0.05)

    async def _post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), method="POST")

        def post() -> Any:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]

        return await asyncio.to_thread(post)


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    needs.programs("chromium", "chromedriver")
    (port,) = free_ports(1)
    with (folder / "chromedriver.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "chromedriver", f"--port={port}", stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        found = Browser(port)
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    await found.open(folder / "profile")
                except OSError:  # the driver is starting
                    await asyncio.sleep(0.1)
                else:
                    break
        yield found
        await asyncio.to_thread(_close, found)
    finally:
        process.terminate()
        await process.wait()


def _close(found: Browser) -> None:
    urllib.request.urlopen(urllib.request.Request(found.base, method="DELETE"), timeout=60).close()


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
        shown = "return document.querySelector('#{} pre').textContent"
        await page.run(send.format("post-rank"))
        assert (await page.until(shown.format("post-rank"))).startswith("401")
        await page.run("document.getElementById('token').value = arguments[0]", TOKEN)
        await page.run("document.querySelector('#post-rank pre').textContent = ''")
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
