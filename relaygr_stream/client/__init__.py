"""The client of a recommendation service: announces requests at retrieval, ranks their candidates, returns scores."""

from relaygr_stream.client.answers import Ranking
from relaygr_stream.client.relay import RelayClient, Request
from relaygr_stream.client.sync import SyncRelayClient

__all__ = ["Ranking", "RelayClient", "Request", "SyncRelayClient"]
