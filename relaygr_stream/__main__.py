"""The first lines of every `relaygr` process: Ctrl-C and SIGTERM end it with one line, also while it imports.

Until a command takes the signals over there is nothing to put in order. Which do: those of `run_process`, `up`, and
what stopping.py runs.
"""

import atexit
import os
import signal
import sys
from types import FrameType


def run() -> None:
    """The console script."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a script's `&` had them ignored: commands do it later
        signal.signal(number, _leave)
    atexit.register(_keep_exit_code)
    from relaygr_stream.cli.main import main  # noqa: PLC0415  (signals first)

    main(prog_name="relaygr")


def run_as_module() -> None:
    """`python -m`, which put the working directory first: a torch.py there is not torch."""
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109  (pathlib is an import to wait for)
        del sys.path[0]
    run()


def _keep_exit_code() -> None:
    """The interpreter ends, with all threads joined: it would give signals their default back, and die of one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _leave(number: int, _frame: FrameType | None) -> None:
    """At once: an exception here would come up in the middle of somebody's import, who may swallow or print it."""
    try:
        os.write(2, b"stopped\n")
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    run_as_module()
