"""Logs, metrics, health: what every process shows of itself. Knows nothing of relays."""
