"""Workloads: logs of interactions and generated requests, the driver that sends them, metrics and report."""
