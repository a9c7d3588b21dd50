"""The page as bytes: made once a second at most, however many look at it, and shared by all of them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

from relaygr_stream.ops.dashboard.history import FleetHistory, Slot
from relaygr_stream.ops.dashboard.page import live
from relaygr_stream.ops.dashboard.picture import take
from relaygr_stream.ops.dashboard.tables import traced
from relaygr_stream.ops.dashboard.trace import RequestTrace, trace
from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.ops.status.table import as_json
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.topic_files import TopicSet, lane_of
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
        clock: Clock = time.monotonic,
    ) -> None:
        self._history = FleetHistory(reader.most_names)
        self.view: Final = Overview(settings, topics, reader, follower=self._history)
        self._links = links
        self._clock = clock
        self._made_s = -FRESH_S
        self._live = b""
        self._turn = asyncio.Lock()
        self._searching = asyncio.Lock()

    async def live(self) -> bytes:
        """The part that changes, at most FRESH_S old."""
        async with self._turn:
            if self._clock() - self._made_s >= FRESH_S:
                self._made_s = self._clock()
                # On a thread: of a thousand workers it takes 30 ms, and a gateway's rankings wait for none of it.
                made = asyncio.to_thread(_made, self.view.snapshot(), self._history.slots())
                self._live = (await made).encode()
            return self._live

    async def page(self, trace: str = "") -> bytes:
        """The whole page. trace: the form and what was found of a request, as HTML."""
        page = _PAGE.replace("{style}", _STYLE).replace("{script}", _SCRIPT).replace("{links}", self._links)
        inside = {b"{trace}": (trace or traced()).encode(), b"{live}": await self.live()}
        return re.sub(rb"\{(trace|live)\}", lambda found: inside[found[0]], page.encode())

    async def trace(self, query: str, lanes: Sequence[int] = (), tenant: str | None = None) -> bytes:
        """The page with a request: `id` of the query, and `user`. lanes, tenant: as for trace.trace.

        One search at a time: it costs this process up to seconds of the log.
        """
        asked = dict(parse_qsl(query))
        request_id, user_id = asked.get("id", ""), asked.get("user", "")
        found: RequestTrace | str = "Another search is under way; ask again in some seconds."
        if not request_id:
            found = "Name a request id."
        elif not self._searching.locked():
            async with self._searching:
                lanes = [lane_of(user_id, self.view.topics.lanes)] if user_id else lanes
                found = await trace(self.view.settings.kafka, self.view.topics, request_id, lanes, tenant)
        return await self.page(traced(found, request_id, user_id))

    def json(self) -> str:
        """What `relaygr status --json` prints."""
        return as_json(self.view)


def _made(view: Overview, slots: list[Slot | None]) -> str:
    return live(take(view, slots))
