"""Logs, metrics and health of every long-running process."""
