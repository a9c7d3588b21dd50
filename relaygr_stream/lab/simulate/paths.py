"""The ways of messages around one simulated worker."""

from __future__ import annotations

import numpy as np

from relaygr_stream.lab.simulate.bus import BusLatency, Way
from relaygr_stream.lab.simulate.noise import Lasting


class Paths:
    """To the worker and back from it are slow together: its event loop, its host and its broker are the same."""

    def __init__(self, bus: BusLatency, answers: BusLatency, rng: np.random.Generator) -> None:
        around = Lasting(bus.lasting_ms / 1e3, rng)
        self.to_worker = Way(bus, around)
        self.to_client = Way(answers, around)
        self.to_trigger = Way(bus, Lasting(bus.lasting_ms / 1e3, rng))
