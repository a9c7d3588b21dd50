"""Simulation of fleets: the real trigger, assignor, cache and scheduler in simulated time."""
