"""Trains the checkpoint that `relaygr demo` ranks with, on the project's own generator."""
