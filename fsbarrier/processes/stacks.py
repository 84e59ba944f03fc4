"""Asks running Python programs to write their stacks into their own logs (fsbarrier/processes/stack_signal.py), even if they hang."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from fsbarrier.processes import processes
from fsbarrier.processes.stack_signal import SIGNAL

# How long processes may take to accept the signal. A process that runs takes milliseconds, also while it waits for a lock.
ACCEPT_S = 5.0
LOOK_S = 0.1


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
        found = re.search(rf"^{field}:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (SIGNAL - 1) & 1)
