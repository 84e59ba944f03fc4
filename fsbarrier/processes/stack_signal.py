"""Makes this process write its Python stack into its own log when the signal of `fsbarrier debug` comes (processes/stacks.py).

Each program registers when it imports fsbarrier, if a daemon started it (ASKED in its environment). The signal would kill any other
program, so it is sent only to processes that handle it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal

#: set for every program that a daemon starts (supervisor.with_this_package)
ASKED = "FSBARRIER_STACKS"
#: An unused signal: Slurm, vLLM and torch use SIGUSR1 and SIGUSR2.
SIGNAL = signal.SIGRTMIN + 11


def register() -> None:
    """Make SIGNAL write the stack of the interrupted thread, usually the main one, to standard error, which is the program's log.

    Does nothing if the system does not support it.
    """
    with contextlib.suppress(OSError, AttributeError, ValueError, RuntimeError):
        # faulthandler restores this handler during shutdown, when the signal must not kill the program either.
        signal.signal(SIGNAL, signal.SIG_IGN)
        # Not all threads: the handler would read frames while another thread changes them, which could crash a healthy program.
        faulthandler.register(SIGNAL, 2, all_threads=False)


def register_daemon(log: int) -> None:
    """Make SIGNAL write the stacks of all threads to the open file `log`, as soon as the main thread runs Python code."""
    # Python calls this handler in the main thread, which holds the interpreter's lock, so the frames do not change.
    signal.signal(SIGNAL, lambda *_: faulthandler.dump_traceback(log))
