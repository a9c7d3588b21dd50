"""Two scenarios with opposite tides, on a few devices: simulated, and on real processes."""
