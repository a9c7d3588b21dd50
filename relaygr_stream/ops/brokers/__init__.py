"""Brokers for development and tests: the embedded one, and Kafka from a distribution."""
