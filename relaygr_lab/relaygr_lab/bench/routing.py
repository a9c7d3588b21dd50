"""The bench's client: sends rankings to the owner of the user's lane, or to other workers, as a mode wants.

It is the only sender, so what it has sent to a worker and not heard of is all that waits there.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec

from relaygr_lab.policies import Route
from relaygr_stream.bus.producer import Outgoing
from relaygr_stream.client import RelayClient
from relaygr_stream.client.connection import Connection
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply, WorkerStatus
from relaygr_stream.wire.topic_files import lane_of
from relaygr_stream.worker.forwarding import MOST_HOPS


class RoutedClient(RelayClient):
    """A RelayClient whose rankings go where `route` says."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.route: Route = "owner"
        self._random = random.Random(0)
        self._waiting: Counter[str] = Counter()  # rankings at each worker

    async def _ask(self, connection: Connection, request: RankingRequest, message: Outgoing) -> ScoreReply:
        if self.route == "owner":
            return await super()._ask(connection, request, message)
        name, lane = self._place(request)
        stays = message._replace(value=encode(msgspec.structs.replace(request, hops=MOST_HOPS)))
        self._waiting[name] += 1
        try:
            return await connection.rank(request, stays, lane)
        finally:
            self._waiting[name] -= 1

    def _place(self, request: RankingRequest) -> tuple[str, int]:
        """The worker that is asked, and the lane to reach it by."""
        home = lane_of(request.user_id, self._topics.lanes)
        workers = [] if self.route == "lane" else self._serving()
        if not workers:
            owner = self._owners.owner(home)
            return "" if owner is None else owner.worker.name, home
        self._random.shuffle(workers)
        if self.route == "least":
            workers.sort(key=lambda status: self._waiting[status.name])
        chosen = workers[0]
        return chosen.name, self._random.choice(chosen.lanes).lane

    def _serving(self) -> list[WorkerStatus]:
        return [status for status in self._owners.workers().values() if status.state == "serving" and status.lanes]
