"""Prefix KV of lanes that moved, from the worker that had them to the one that has them now."""
