"""How a Python program of ours lets its daemon ask for its stacks: the signal, and the file in memory into which it writes them.

Each program registers when it imports fsbarrier, if its daemon started it (ASKED in its environment). Nothing of it is on a disk, so that
nothing is left over, and a mount that hangs keeps no stack from being written. A program is sent the signal only while it has a handler
for it and holds a file of memory that bears its own pid: any other program would be ended by it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

#: Set for every program that a daemon starts (supervisor.with_this_package).
ASKED = "FSBARRIER_STACKS"
#: Nobody else uses this one: Slurm, vLLM and torch have uses of their own for SIGUSR1 and SIGUSR2.
SIGNAL = signal.SIGRTMIN + 11

_registered_as = 0


def file_name(pid: int) -> str:
    """By which the file is known in /proc/PID/fd."""
    return f"fsbarrier-stacks-{pid}"


def register() -> None:
    """From now on SIGNAL makes this process write the stack of the thread that it interrupts, mostly the main one. Does nothing where the
    system cannot do that."""
    global _registered_as
    me = os.getpid()
    if _registered_as == me:
        return
    with contextlib.suppress(OSError, AttributeError, ValueError, RuntimeError):
        # A fork inherits the note that it is registered, and not always the signal's handler.
        faulthandler.unregister(SIGNAL)
        # While Python ends, it goes back to what held before: a signal that arrives then must not end the program.
        signal.signal(SIGNAL, signal.SIG_IGN)
        # Not all threads: the handler would read frames that another thread changes, and could end a healthy program.
        faulthandler.register(SIGNAL, os.memfd_create(file_name(me)), all_threads=False)
        _registered_as = me
