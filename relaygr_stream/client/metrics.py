"""The client's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

#: Seconds: from a ranking that hits on an accelerator up to the default timeout and beyond.
RANK_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)


class ClientMetrics:
    """A client's metrics in one registry; two clients in one process need two registries."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rankings = Counter(
            "relaygr_client_rankings",
            "rank() calls by outcome: where the prefix KV was found, or the error.",
            ["outcome"],
            registry=registry,
        )
        self.rank_seconds = Histogram(
            "relaygr_client_rank_seconds", "Time of answered rank() calls.", buckets=RANK_BUCKETS, registry=registry
        )
        self.in_flight = Gauge("relaygr_client_in_flight", "rank() calls without an answer yet.", registry=registry)
        self.announcements = Counter(
            "relaygr_client_announcements",
            "Request events by outcome: sent, or the error.",
            ["outcome"],
            registry=registry,
        )
        self.cancels = Counter(
            "relaygr_client_cancels",
            "Cancels of announced requests that were not ranked, by outcome: sent, or the error.",
            ["outcome"],
            registry=registry,
        )
        self.route_share = Gauge(
            "relaygr_client_route_share",
            "Part of the users that the newest known routes give to a group of workers.",
            ["group"],
            registry=registry,
        )
        self.hedges = Counter(
            "relaygr_client_hedges",
            "Copies of ranking requests sent on another lane: slow (no answer in time), silent (the lane's "
            "owner publishes no status), unsent (the broker of the lane or of the answer acknowledges nothing), "
            "group (no worker of the group serves any more, and one of another group does).",
            ["reason"],
            registry=registry,
        )
        self.answers_dropped = Counter(
            "relaygr_client_answers_dropped",
            "Answers dropped: late (the call has ended), duplicate, foreign (another client's), forged (without the "
            "required signature, or with another request's id), kind (of a later release).",
            ["reason"],
            registry=registry,
        )
