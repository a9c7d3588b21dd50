"""Trains the built-in HSTU on real histories, evaluates it offline, serves it through Kafka, and compares."""
