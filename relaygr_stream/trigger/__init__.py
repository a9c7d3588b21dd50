"""trigger."""
