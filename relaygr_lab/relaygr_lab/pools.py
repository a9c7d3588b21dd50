"""Processes that share the work of simulations."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor

import torch


def pool_of(processes: int | None = None) -> ProcessPoolExecutor:
    """So many processes, or one per core: of one thread each, and ended with this one, whatever ends it.

    Spawned, not forked: torch's threads do not survive a fork.
    """
    return ProcessPoolExecutor(processes or os.cpu_count(), multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
