"""The model protocol, the built-in HSTU, checkpoints."""
