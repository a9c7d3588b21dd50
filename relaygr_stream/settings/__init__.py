"""The settings: their schema (schema.py, worker.py), a fleet's scenarios (scenarios.py), and the sources of both:
files, the environment, flags (load.py)."""

from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Client, Kafka, Relay, Settings, Telemetry, Trigger
from relaygr_stream.settings.worker import Handover, Kernels, Model, Worker

__all__ = [
    "Client",
    "Handover",
    "Kafka",
    "Kernels",
    "Model",
    "Relay",
    "Scenario",
    "Settings",
    "Telemetry",
    "Trigger",
    "Worker",
]
