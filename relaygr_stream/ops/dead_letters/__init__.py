"""Dead letters: read, listed, replayed."""
