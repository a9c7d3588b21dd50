"""The bus: Kafka clients that read, write and check topics, and recover from failures."""
