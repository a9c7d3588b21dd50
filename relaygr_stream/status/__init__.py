"""What triggers and workers state about themselves on `worker-status`: read with care, signed, and shown."""
