"""Kills processes that a guard could not, because it was killed together with its daemon.

While a program runs, its daemon records the process tree in a private folder of this machine. The next start of any
program by the same user kills what is left of recorded trees whose daemon is dead. Processes are identified by pid,
start time, boot and pid namespace, so no other process is hit. Nothing here raises OSError: if a record cannot be
written, the guard still works.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.processes import processes
from fsbarrier.store import files
from fsbarrier.store.identity import boot_id
from fsbarrier.store.retry import Backoff
from fsbarrier.store.user_dir import user_dir

# How long to keep killing a tree.
KILL_S = 5.0
# Pauses between rounds of killing. A killed process is gone within a millisecond unless it hangs in the kernel.
ROUNDS = Backoff(0.001, 0.5)

# Taken by the first `end_orphans` of a process and never released.
_swept = threading.Lock()


def record_tree(name: str, tree: Mapping[int, int]) -> None:
    """Record `tree` (pid -> start time) under `name`, replacing an earlier record."""
    with contextlib.suppress(OSError, UsageError):
        me = os.getpid()
        record = {"here": _here(), "daemon": [me, processes.Stat(me).start], "tree": list(tree.items())}
        files.write_atomic(user_dir() / _file_name(name), json.dumps(record).encode())


def forget_tree(name: str) -> None:
    """Remove the record `name`, because all its processes have ended."""
    with contextlib.suppress(OSError, UsageError):
        (user_dir() / _file_name(name)).unlink(missing_ok=True)


def end_orphans() -> dict[int, int]:
    """Kill processes left on this machine by dead daemons of this user; returns them as pid -> start time.

    Only the first call in a process has an effect.
    """
    hit: dict[int, int] = {}
    if not _swept.acquire(blocking=False):
        return hit
    with contextlib.suppress(OSError, UsageError):
        _remove_unfinished(user_dir())
        for path in sorted(user_dir().glob("*.json")):
            # A record may be torn, or written by another version.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                hit |= _end_recorded(path)
    return hit


def _remove_unfinished(folder: Path) -> None:
    """Remove temporary records of daemons that were killed while writing."""
    for path in folder.glob(".*-*.json.*.tmp"):
        namespace, pid, *_ = path.name[1:].split("-", 2)
        if namespace == _pid_namespace() and pid.isdecimal() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def _end_recorded(path: Path) -> dict[int, int]:
    record, here = json.loads(path.read_bytes()), _here()
    tree = {int(pid): int(start) for pid, start in record["tree"]}
    hit: dict[int, int] = {}
    # After a reboot no process can be left, so only remove the record.
    if record["here"]["boot"] == here["boot"]:
        # Pids of another pid namespace refer to other processes, and a living daemon manages its own.
        if record["here"] != here or processes.alive(dict([record["daemon"]])):
            return hit
        hit = kill_tree(tree, KILL_S)
        if processes.alive(tree):
            return hit
    path.unlink(missing_ok=True)
    return hit


def kill_tree(tree: Mapping[int, int], deadline_s: float, *, session: int = 0) -> dict[int, int]:
    """Kill the remaining processes of `tree` (pid -> start time) and of the given session, with their descendants; returns them."""

    def find() -> dict[int, int]:
        found = {pid: stat for pid, stat in processes.scan().items() if not stat.ended}
        ours = {pid: start for pid, start in tree.items() if pid in found and found[pid].start == start}
        if session:
            ours |= {pid: stat.start for pid, stat in found.items() if stat.session == session}
        for pid in list(ours):
            ours |= processes.below(pid, found)
        return ours

    all_hit: dict[int, int] = {}
    deadline = time.monotonic() + deadline_s
    for pause_s in ROUNDS:
        hit = processes.freeze_and_kill(find)
        all_hit |= hit
        if not hit or time.monotonic() >= deadline:
            break
        threading.Event().wait(pause_s)
    return all_hit


def _here() -> dict[str, str]:
    """The scope in which a pid and start time are valid: this boot and pid namespace."""
    return {
        "boot": boot_id(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }


def _file_name(name: str) -> str:
    return f"{_pid_namespace()}-{os.getpid()}-{name}.json"


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")
