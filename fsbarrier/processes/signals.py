"""Handlers for the signals that end a program, and for the one with which `fsbarrier debug` asks for stacks.

Running Python programs then write their stacks into their own logs, even if they hang. Each program registers for the signal when it
imports fsbarrier, if a daemon started it (ASKED in its environment). The signal would kill any other, so it is sent only to processes that
handle it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fsbarrier.processes import processes

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: set for every program that a daemon starts (supervisor.with_this_package)
ASKED = "FSBARRIER_STACKS"
#: An unused signal: Slurm, vLLM and torch use SIGUSR1 and SIGUSR2.
SIGNAL = signal.SIGRTMIN + 11
# How long processes may take to accept the signal. A process that runs takes milliseconds, also while it waits for a lock.
ACCEPT_S = 5.0
LOOK_S = 0.1


class Interrupted(SystemExit):
    """A signal asked this process to end. Unless this is caught, the process exits with the usual code."""

    code: int


def end(number: int, frame: FrameType | None) -> NoReturn:
    """A handler that ends the program with an exception, so that clean-up code runs."""
    raise Interrupted(130 if number == signal.SIGINT else 143)


def end_once(number: int, frame: FrameType | None) -> NoReturn:
    """Do the same as `end`, but ignore later signals, so that a program can wait for its nodes to stop."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    end(number, frame)


@contextmanager
def ending_signals_handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Use `handle` for terminating signals inside this context, and restore the previous handlers afterwards.

    Only for the main thread, because Python sets handlers only there.
    """
    before = {number: signal.signal(number, handle) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def write_stacks(tree: Mapping[int, int]) -> dict[int, bool]:
    """Ask those processes of `tree` (pid -> start time) that handle the signal for their stacks.

    Returns for each of these whether it has accepted the signal, and so writes: not if it is stopped or hangs in the kernel.
    """
    asked, pause = set[int](), threading.Event()
    for pid, start in tree.items():
        # Other code may have reset the handler, and then the signal would kill the process.
        if _has(pid, "SigCgt") and processes.send(pid, start, SIGNAL):
            asked.add(pid)
            # A stack is written letter by letter, and processes that share a log would mix theirs. So each has a moment of its own.
            pause.wait(LOOK_S)
    deadline, waiting = time.monotonic() + ACCEPT_S, {pid for pid in asked if _has(pid, "ShdPnd")}
    while waiting and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        waiting = {pid for pid in waiting if _has(pid, "ShdPnd")}
    return {pid: pid not in waiting for pid in sorted(asked)}


def _has(pid: int, field: str) -> bool:
    """Whether SIGNAL is in this set of /proc/PID/status: SigCgt, the handled signals, or ShdPnd, those not accepted yet."""
    try:
        mask = re.search(rf"^{field}:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return mask is not None and bool(int(mask[1], 16) >> (SIGNAL - 1) & 1)
