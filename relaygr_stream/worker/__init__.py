"""The worker: one process, one device. The loop owns the bus, the device thread owns scheduler, cache and model."""
