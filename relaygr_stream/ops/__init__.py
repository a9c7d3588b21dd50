"""What operators run beside the service: supervisor, local brokers, dead letters, status."""
