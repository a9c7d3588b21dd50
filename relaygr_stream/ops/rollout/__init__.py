"""Moves users from one group of workers to another, by steps, and back by itself."""
