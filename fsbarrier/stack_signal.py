"""Lets the daemon request the stacks of its Python programs, with a signal and a memfd into which the program writes them.

Each program registers when it imports fsbarrier, if a daemon started it (ASKED in its environment). A memfd leaves nothing behind and works
even if a mount hangs. The daemon signals a program only if it handles the signal and holds a memfd with its own pid; the signal would kill
any other program.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

#: set for every program that a daemon starts (supervisor.with_this_package)
ASKED = "FSBARRIER_STACKS"
#: An unused signal: Slurm, vLLM and torch use SIGUSR1 and SIGUSR2.
SIGNAL = signal.SIGRTMIN + 11

_registered_as = 0


def file_name(pid: int) -> str:
    """The memfd's name in /proc/PID/fd."""
    return f"fsbarrier-stacks-{pid}"


def register() -> None:
    """Make SIGNAL write the stack of the interrupted thread, usually the main one. Does nothing if the system does not support it."""
    global _registered_as
    me = os.getpid()
    if _registered_as == me:
        return
    with contextlib.suppress(OSError, AttributeError, ValueError, RuntimeError):
        # A forked process inherits faulthandler's state, but not always the signal handler.
        faulthandler.unregister(SIGNAL)
        # faulthandler restores this handler during shutdown, when the signal must not kill the program either.
        signal.signal(SIGNAL, signal.SIG_IGN)
        # Not all threads: the handler would read frames while another thread changes them, which could crash a healthy program.
        faulthandler.register(SIGNAL, os.memfd_create(file_name(me)), all_threads=False)
        _registered_as = me
