"""The settings: their schema (schema.py) and their sources: files, the environment, flags (load.py)."""

from relaygr_stream.settings.schema import (
    Client,
    Handover,
    Kafka,
    Kernels,
    Model,
    Relay,
    Settings,
    Telemetry,
    Trigger,
    Worker,
)

__all__ = ["Client", "Handover", "Kafka", "Kernels", "Model", "Relay", "Settings", "Telemetry", "Trigger", "Worker"]
