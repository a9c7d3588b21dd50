"""The `relaygr` command: one module for each group of subcommands."""
