"""Debian's Chromium without a window, driven by the W3C protocol of chromedriver."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relaygr_stream.ops.brokers.distribution import free_ports
from tests import needs
from tests.waiting import WITHIN_S

#: No name but this machine's own has an address: what a page loads from elsewhere fails.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"


class Browser:
    """A session of chromedriver, by the W3C protocol."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}/session"

    async def open(self, folder: Path) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", OFFLINE]
        options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
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

    async def console(self) -> list[str]:
        """What the console said since the last call: errors, and what was refused or not found."""
        return [f"{line['level']}: {line['message']}" for line in await self._post("/se/log", {"type": "browser"})]

    async def devtools(self, command: str, **parameters: object) -> Any:
        """A command of the DevTools protocol."""
        return await self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    async def show_as(self, width: int, *, dark: bool) -> None:
        """The size of a screen that many CSS pixels wide, and its scheme of colours."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.devtools("Emulation.setDeviceMetricsOverride", **size)
        await self.devtools("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        return base64.b64decode((await self.devtools("Page.captureScreenshot", captureBeyondViewport=True))["data"])

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
