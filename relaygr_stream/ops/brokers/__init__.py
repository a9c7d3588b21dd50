"""Local brokers for development and tests: the embedded one, and Apache Kafka from a distribution."""
