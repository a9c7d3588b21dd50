"""The recommendation service's side: announce requests at retrieval, rank their candidates, get scores."""

from relaygr_stream.client.answers import Ranking
from relaygr_stream.client.relay import RelayClient, Request

__all__ = ["Ranking", "RelayClient", "Request"]
