"""The gateway's own metrics."""

from __future__ import annotations

import prometheus_client


class Metrics:
    """The gateway's Prometheus metrics."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        self.requests = prometheus_client.Counter(
            "relaygr_gateway_requests", "HTTP requests by path and status", ["path", "status"], registry=registry
        )
        self.seconds = prometheus_client.Histogram(
            "relaygr_gateway_request_seconds",
            "From a request's head to its answer",
            ["path"],
            registry=registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
        )
        self.in_flight = prometheus_client.Gauge(
            "relaygr_gateway_in_flight", "Requests with a valid token that are not answered yet", registry=registry
        )
        self.connections = prometheus_client.Gauge("relaygr_gateway_connections", "Open connections", registry=registry)
