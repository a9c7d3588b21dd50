"""The front door: announce, rank and cancel over HTTP, for services that do not speak Kafka."""
