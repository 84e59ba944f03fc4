"""`fsbarrier guard`: a user's command below two guards (guard.py), so that none of its processes outlives it or whoever started it.

    whoever started it --> this process, a guard --> another guard --> the command --> ...

Each of the two adopts what the other one leaves if it is killed: the outer one because it is the next subreaper, the inner one because it
watches the outer one. Only if both are killed at once may something stay that is not the command itself.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from fsbarrier.processes.guard import (
    PR_SET_CHILD_SUBREAPER,
    Guard,
    prctl,
    program_environment,
    start_main,
)

#: a shell's exit codes for a command that is not there, and for one that cannot be run
NOT_FOUND, NOT_RUNNABLE = 127, 126


def run(argv: Sequence[str], grace_s: float) -> int:
    """Run the command; returns its exit code, or 128 + N if signal N ended it. This process must have one thread."""
    starter = os.getppid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A guard ends everything when the other end closes.
    held, lifeline = socket.socketpair()
    me, pid = os.getpid(), os.fork()
    if pid == 0:
        held.close()
        _inner(list(argv), Guard(lifeline.fileno(), me, grace_s, passes_signals_on=True))
    with held, lifeline:
        outer = Guard(lifeline.fileno(), starter, grace_s, passes_signals_on=True)
        return _code(outer.watch(pid))


def _inner(argv: list[str], guard: Guard) -> NoReturn:
    code = NOT_RUNNABLE
    try:
        # The outer guard sends the signals that it receives to this group.
        os.setsid()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        pid, report = start_main(".", False, argv, program_environment())
        if pid:
            code = _code(guard.watch(pid))
        else:
            error = int(report.split()[1])
            code = NOT_FOUND if isinstance(OSError(error, ""), FileNotFoundError) else NOT_RUNNABLE
            print(f"fsbarrier: error: {argv[0]}: {os.strerror(error)}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _code(code: int) -> int:
    return code if code >= 0 else 128 - code
