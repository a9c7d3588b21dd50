"""The relay on paper: the real trigger, assignor, cache and scheduler under simulated time, for fleets nobody has."""
