"""Kills processes that a guard could not, because it was killed itself: by its daemon, or by this user's next start of any program.

Every process below a guard has the guard's name in its environment: its pid namespace, pid and start time. A process whose guard does not
live any more is an orphan; no other process is hit. A program that clears its environment is not found.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from pathlib import Path

from fsbarrier.processes import processes
from fsbarrier.store.retry import Backoff

# How long to keep killing.
KILL_S = 5.0
# Pauses between rounds of killing. A killed process is gone within a millisecond unless it hangs in the kernel.
ROUNDS = Backoff(0.001, 0.5)


def end_orphans() -> dict[int, int]:
    """Kill processes of this user that dead guards left on this machine; returns them as pid -> start time. Never raises."""
    all_hit: dict[int, int] = {}
    deadline = time.monotonic() + KILL_S
    for pause_s in ROUNDS:
        hit = processes.freeze_and_kill(_orphans)
        all_hit |= hit
        if not hit or time.monotonic() >= deadline:
            break
        threading.Event().wait(pause_s)
    return all_hit


@functools.cache
def end_earlier_orphans() -> tuple[int, ...]:
    """`end_orphans` at the first call in a process; returns their pids."""
    return tuple(end_orphans())


def _orphans() -> dict[int, int]:
    found = processes.scan()
    return {pid: stat.start for pid, stat in found.items() if not stat.ended and _lost_its_guard(pid, found)}


def _lost_its_guard(pid: int, found: dict[int, processes.Stat]) -> bool:
    variable = f"{processes.GUARD_VARIABLE}=".encode()
    # It has ended, or is another user's.
    with contextlib.suppress(OSError, ValueError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        name = next((entry for entry in entries if entry.startswith(variable)), None)
        # Root can read what belongs to others.
        if name is not None and os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            namespace, guard, start = name.removeprefix(variable).decode().split("-")
            living = found.get(int(guard))
            lives = living is not None and living.start == int(start) and not living.ended
            return namespace == processes.pid_namespace() and not lives
    return False
