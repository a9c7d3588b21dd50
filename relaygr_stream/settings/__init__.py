"""The settings: one schema (schema.py), read from files, the environment and flags (load.py)."""

from relaygr_stream.settings.schema import (
    Client,
    Handover,
    Kafka,
    Model,
    Relay,
    Settings,
    Telemetry,
    Trigger,
    Worker,
)

__all__ = ["Client", "Handover", "Kafka", "Model", "Relay", "Settings", "Telemetry", "Trigger", "Worker"]
