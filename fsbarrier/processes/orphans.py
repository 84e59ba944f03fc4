"""Kills processes whose guard was killed itself. The guard's daemon does this, or this user's next start of any program.

Every process below a guard has the guard's name in its environment, and when the guard dies, the kernel makes init its parent. A process
for which both hold is an orphan, and so are its descendants that name the same guard. Nothing else is killed, not even processes that a
service (tmux, Slurm) started on request. A program that clears its environment is not found.
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
    stats = processes.scan()
    guards = {
        pid: guard for pid, stat in stats.items() if not stat.ended and (guard := _dead_guard(pid, stats))
    }
    orphans: dict[int, int] = {}
    for pid, guard in guards.items():
        top = pid
        while guards.get(stats[top].ppid) == guard:
            top = stats[top].ppid
        if _adopts(stats[top].ppid):
            orphans[pid] = stats[pid].start
    return orphans


def _dead_guard(pid: int, stats: dict[int, processes.Stat]) -> str:
    """The name of this process's guard if the guard is dead; "" if it is alive, or there is none."""
    variable = f"{processes.GUARD_VARIABLE}=".encode()
    # The process has ended, or is another user's.
    with contextlib.suppress(OSError, ValueError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        entry = next((entry for entry in entries if entry.startswith(variable)), b"")
        # Root can read the environment of other users' processes too.
        if entry and os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            name = entry.removeprefix(variable).decode()
            scope, guard, start = name.rsplit("/", 2)
            living = stats.get(int(guard))
            lives = living is not None and living.start == int(start) and not living.ended
            return name if scope == processes.scope() and not lives else ""
    return ""


def _adopts(pid: int) -> bool:
    """Whether the process is init, or a user's systemd, which also adopts orphans."""
    with contextlib.suppress(OSError):
        return pid == 1 or Path(f"/proc/{pid}/comm").read_text() == "systemd\n"
    return False
