"""RelayGR Stream: relay-race inference for generative recommendation over Kafka."""
