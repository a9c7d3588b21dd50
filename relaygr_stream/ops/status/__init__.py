"""What runs in a fleet, and what is odd about it."""
