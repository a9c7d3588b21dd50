"""The processes of a fleet, and what is odd about them."""
