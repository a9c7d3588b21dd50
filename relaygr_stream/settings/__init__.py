"""The settings: their schema (schema.py, worker.py) and their sources: files, the environment, flags (load.py)."""

from relaygr_stream.settings.schema import Client, Kafka, Relay, Settings, Telemetry, Trigger
from relaygr_stream.settings.worker import Handover, Kernels, Model, Worker

__all__ = ["Client", "Handover", "Kafka", "Kernels", "Model", "Relay", "Settings", "Telemetry", "Trigger", "Worker"]
