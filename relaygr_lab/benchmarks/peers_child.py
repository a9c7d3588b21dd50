"""One peer in a process of its own: prepares a row, then takes its turns as the bench asks. Needs torch and the peer.

    python relaygr_lab/benchmarks/peers_child.py NAME
        a request a line on standard input, an answer a line on standard output

Requests and answers are JSON. {"prepare": FILE, "copies": N, "folder": FOLDER} computes once and saves the outputs as
FOLDER/outputs.pt; {"turn": SECONDS} runs for that long and answers with the seconds of each run. An answer has
"unsupported" where the peer has no such row, and "failed" with the reason where it failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import peers_runtimes
import torch
from peers_runtimes import Run, UnsupportedRowError

#: Peers by name: the package that each needs, and what prepares a row.
PEERS: Final[dict[str, tuple[str, Callable[[peers_runtimes.Row], Run]]]] = {
    "torch": ("torch", peers_runtimes.eager),
    "torch.compile": ("torch", peers_runtimes.compiled),
    "onnxruntime": ("onnxruntime", peers_runtimes.onnxruntime),
    "openvino": ("openvino", peers_runtimes.openvino),
}


def turn(run: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each run, for about `seconds` and at least once."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


class Child:
    """Answers the bench's requests."""

    def __init__(self, name: str) -> None:
        self.package, self.prepare = PEERS[name]
        self.row: peers_runtimes.Row | None = None
        self.run: Run | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "turn" in request:
            assert self.run is not None
            return {"times": turn(self.run, request["turn"])}
        self.run = self.row = None  # frees the last row before the next is made
        folder = Path(request["folder"])
        self.row = peers_runtimes.build(Path(request["prepare"]), request["copies"], folder)
        self.run = self.prepare(self.row)
        torch.save([part.clone() for part in self.run()], folder / "outputs.pt")
        self.run()  # what a first call leaves to the second
        return {"version": peers_runtimes.version(self.package)}


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    child = Child(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # runtimes print what they like
    for line in sys.stdin:
        try:
            answer = child.answer(json.loads(line))
        except UnsupportedRowError as error:
            answer = {"unsupported": str(error)}
        except ModuleNotFoundError as error:
            answer = {
                "failed": f"{error.name} is not installed here: `make bench-peers` installs it, or start with --python"
            }
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            answer = {"failed": f"{type(error).__name__}: {reason}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
