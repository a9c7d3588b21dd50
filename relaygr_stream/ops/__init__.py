"""Operators' tools beside the service: supervisor, local brokers, dead letters, status."""
