"""A small recommendation service: behaviours in, recommendations out, ranked over the relay."""
