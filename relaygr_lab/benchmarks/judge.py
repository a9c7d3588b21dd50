"""How every benchmark ends: with the bounds not kept, where they are judged (verdicts.py), or with why its figures are
not valid. The exit code is 1 in both cases; STOPPED after Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from relaygr_lab.verdicts import judged

from relaygr_stream.errors import RelayError

#: A shell's code for what SIGINT ended.
STOPPED = 130


def judge(*parts: Callable[[], Sequence[str]]) -> None:
    """Run the parts, each of which measures, prints and returns the bounds not kept. One whose fleet or figures fail
    does not keep the others from running. Comes last: it may leave the process."""
    failed = stopped = False
    for part in parts:
        try:
            broken = part()
        except* (RelayError, TimeoutError) as errors:
            failed = True
            print(f"not valid: {'; '.join(_said(errors))}", flush=True)
        except* KeyboardInterrupt:
            stopped = True
        else:
            failed |= judged(broken)
        if stopped:
            print("stopped", flush=True)
            sys.exit(STOPPED)
    if failed:
        sys.exit(1)


def _said(error: BaseException) -> list[str]:
    """What the errors of a group say, each once, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return list(dict.fromkeys(said for inner in error.exceptions for said in _said(inner)))
    return [str(error) or "something took too long"]
