"""The page as bytes: made once a second at most, however many look at it, and shared by all of them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from relaygr_stream.ops.dashboard.history import FleetHistory
from relaygr_stream.ops.dashboard.page import live
from relaygr_stream.ops.dashboard.picture import take
from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.ops.status.table import as_json
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.worker_status import StatusReader

#: Seconds for which what was made is answered again.
FRESH_S: Final = 1.0
_FILES: Final = Path(__file__).parent
_STYLE, _SCRIPT, _PAGE = (_FILES.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js", "page.html"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


#: Nothing is loaded, sent or framed from or to elsewhere, and no style or script runs but the page's own.
HEADERS: Final = {
    "content-security-policy": (
        f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
        "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Board:
    """A fleet, and its page. view: to be kept up to date by the caller, who feeds it the records of `worker-status`.

    links: HTML of the page's head. clock: seconds.
    """

    def __init__(
        self,
        settings: Settings,
        topics: TopicSet,
        reader: StatusReader,
        links: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = FleetHistory(reader.most_names)
        self.view: Final = Overview(settings, topics, reader, on_status=self._history.add)
        self._links = links
        self._clock = clock
        self._made_s = -FRESH_S
        self._live = b""
        self._turn = asyncio.Lock()

    async def live(self) -> bytes:
        """The part that changes, at most FRESH_S old."""
        async with self._turn:
            if self._clock() - self._made_s >= FRESH_S:
                self._made_s = self._clock()
                # The numbers here, for nobody changes them meanwhile; the text on a thread: rankings wait for neither.
                picture = take(self.view, self._history)
                self._live = (await asyncio.to_thread(live, picture)).encode()
            return self._live

    async def page(self) -> bytes:
        """The whole page."""
        page = _PAGE.replace("{style}", _STYLE).replace("{script}", _SCRIPT).replace("{links}", self._links)
        return page.encode().replace(b"{live}", await self.live())

    def json(self) -> str:
        """What `relaygr status --json` prints."""
        return as_json(self.view)
