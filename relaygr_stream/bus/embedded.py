"""What clients do otherwise at the embedded broker (Tansu) than at Apache Kafka: monkey patches of aiokafka 0.14, for
clients with a ClientId.

- It does not answer a waiting fetch when a record arrives.
- It answers each join after half a session, in whole seconds.
- A group's first generation is 0. aiokafka takes that for no membership, and does not leave.
- A leader that leaves while the group rebalances stays its leader: nobody assigns lanes any more, for ever.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any, Final

import structlog
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import KafkaError, NoError
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import JoinGroupRequest

from relaygr_stream.bus.aiokafka_patches import ClientId

log = structlog.get_logger(__name__)

#: How it names its cluster in metadata; Apache Kafka's ids are UUIDs.
EMBEDDED_CLUSTER: Final = "tansu_cluster"
#: Longest wait of a fetch, in ms. With 4, the polls of a demo's consumers take a quarter of two slow cores, and delay
#: all processes.
EMBEDDED_FETCH_WAIT_MS: Final = 12
#: Longest session of a group, in ms: a join takes two seconds, in which lanes that moved have no owner. With 2000 it
#: would take one, but who is silent for two seconds would lose its lanes.
EMBEDDED_SESSION_MS: Final = 4000

_update_metadata, _send = ClusterMetadata.update_metadata, AIOKafkaClient.send


def _is_embedded(client: Any) -> bool:
    at = getattr(client.cluster, "_relaygr_cluster_id", None)
    return at == EMBEDDED_CLUSTER and isinstance(client._client_id, ClientId)


def update_metadata(self: Any, metadata: Any) -> None:
    """As ClusterMetadata.update_metadata; keeps the cluster's id, which says what kind of broker answers now."""
    self._relaygr_cluster_id = getattr(metadata, "cluster_id", None)
    _update_metadata(self, metadata)


async def send(self: Any, node_id: int, request: Any, **options: Any) -> Any:
    """As AIOKafkaClient.send. A fetch for the next record (not for many bytes) waits EMBEDDED_FETCH_WAIT_MS at most; a
    member's session lasts EMBEDDED_SESSION_MS at most."""
    if _is_embedded(self):
        if isinstance(request, FetchRequest) and request._min_bytes <= 1:
            request._max_wait_ms = min(request._max_wait_ms, EMBEDDED_FETCH_WAIT_MS)
        elif isinstance(request, JoinGroupRequest):
            request._session_timeout = min(request._session_timeout, EMBEDDED_SESSION_MS)
    return await _send(self, node_id, request, **options)


ClusterMetadata.update_metadata, AIOKafkaClient.send = update_metadata, send

_send_req, _maybe_leave_group = GroupCoordinator._send_req, GroupCoordinator._maybe_leave_group


async def send_req(self: Any, request: Any) -> Any:
    """As GroupCoordinator._send_req; after a join also makes a leader that has left a member again, which then expires
    with its session, and another leads."""
    answer = await _send_req(self, request)
    if isinstance(request, JoinGroupRequest) and answer.error_code == NoError.errno and _is_embedded(self._client):
        self._relaygr_leads = answer.leader_id == answer.member_id
        if answer.leader_id and not self._relaygr_leads:
            with suppress(KafkaError):  # else the sync of this join has it, too
                found = await _send_req(self, DescribeGroupsRequest([self.group_id]))
                if answer.leader_id not in {member[0] for member in found.groups[0][5]}:
                    log.warning("the group's leader has left; the group waits for its session", group=self.group_id)
                    in_its_name = copy.copy(request)
                    in_its_name._member_id = answer.leader_id
                    await _send_req(self, in_its_name)
    return answer


async def maybe_leave_group(self: Any) -> None:
    """As GroupCoordinator._maybe_leave_group, also from the generation 0. A leader only leaves a group that does not
    rebalance; else its session ends by itself."""
    if self.generation >= 0 and _is_embedded(self._client):
        leads = getattr(self, "_relaygr_leads", False)
        if leads:
            with suppress(KafkaError):  # else the request to leave has it, too
                await self._do_heartbeat()  # which tells whether the group rebalances
        if leads and self._rejoin_needed_fut.done():
            self.reset_generation()
        elif self.generation == 0:
            self.generation = 1  # no request states it, and it is reset then
    await _maybe_leave_group(self)


GroupCoordinator._send_req, GroupCoordinator._maybe_leave_group = send_req, maybe_leave_group
