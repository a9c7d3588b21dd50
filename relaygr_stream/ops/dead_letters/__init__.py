"""Reads, lists and replays dead letters."""
