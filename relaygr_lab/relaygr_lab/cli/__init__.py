"""The laboratory's commands: `relaygr demo`, `simulate`, `bench`."""
