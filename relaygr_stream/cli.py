"""The `relaygr` command."""
