"""What runs on the device thread: scheduling, admission, prefill, scoring. It knows no Kafka and no event loop."""
