"""Collects the Python stacks of a process tree, even of hung processes: with py-spy if installed, else by signalling each process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.stack_signal import SIGNAL, file_name
from fsbarrier.supervision import processes

# Timeouts: for py-spy per process, and for all processes together to write their stacks.
PY_SPY_S, WRITE_S = 5.0, 8.0
# Maximum pause between two writes of one process on a busy machine.
LOOK_S = 0.3
# Maximum bytes to read per process.
MOST_BYTES = 256 * 1024


def stacks_of(tree: Mapping[int, int]) -> dict[int, str]:
    """The stacks of the processes in `tree` (pid -> start time) that support it, or the reason why one failed."""
    me = os.getpid()
    own = {me: _own_stacks()} if me in tree else {}
    found = own | _by_py_spy({pid: start for pid, start in tree.items() if pid not in own})
    return found | _by_signal({pid: start for pid, start in tree.items() if pid not in found})


def _own_stacks() -> str:
    """The stacks of all threads of this process. Done without the signal: its handler reads frames of other threads while they change,
    which once crashed a healthy daemon with SIGSEGV."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def _by_py_spy(tree: Mapping[int, int]) -> dict[int, str]:
    """The stacks from py-spy. If py-spy lacks permission, it fails for all processes."""
    program, found = shutil.which("py-spy"), dict[int, str]()
    deadline = time.monotonic() + 2 * PY_SPY_S
    for pid in tree:
        left_s = min(PY_SPY_S, deadline - time.monotonic())
        if program is None or left_s <= 0:
            break
        try:
            # Nonblocking, because a py-spy that is killed while its target hangs in a mount would leave the target stopped.
            argv = [program, "dump", "--pid", str(pid), "--nonblocking"]
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout:
            # The first line is the command, which may contain a secret setting.
            _, _, text = done.stdout[:MOST_BYTES].decode(errors="replace").partition("\n")
            found[pid] = text
    return found


@dataclass
class _Writing:
    """The memfd into which a process writes its stacks: its path, its initial size, and its size at the last check."""

    path: str
    before: int
    size: int

    def grew(self) -> bool:
        """Whether it has grown since the last call; False for a process that has ended."""
        last, self.size = self.size, _size(self.path)
        return self.size > last


def _by_signal(tree: Mapping[int, int]) -> dict[int, str]:
    """The stacks of the processes that have registered for the signal (fsbarrier/stack_signal.py)."""
    asked = dict[int, _Writing]()
    for pid, start in tree.items():
        path = _memory_file(pid)
        size = _size(path) if path else 0
        if path and _handles(pid) and processes.send(pid, start, SIGNAL):
            asked[pid] = _Writing(path, size, size)
    deadline, pause, writing = time.monotonic() + WRITE_S, threading.Event(), set(asked)
    while writing and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        # A process writes in several pieces. It is done when the file has stopped growing.
        grew = {pid for pid in writing if asked[pid].grew()}
        unbegun = {pid for pid in writing if asked[pid].size == asked[pid].before and not _stopped(pid)}
        writing = grew | unbegun
    return {pid: _written(each) for pid, each in asked.items()}


def _memory_file(pid: int) -> str:
    """The path under which the process's memfd can be opened; "" if it has none."""
    folder, name = f"/proc/{pid}/fd", f"/memfd:{file_name(pid)} (deleted)"
    try:
        for fd in os.listdir(folder):
            if os.readlink(f"{folder}/{fd}") == name:
                return f"{folder}/{fd}"
    except OSError:
        # It has ended, or runs as another user.
        pass
    return ""


def _handles(pid: int) -> bool:
    """Whether the process currently handles SIGNAL. Other code may have reset the handler, and then the signal would kill the process."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


def _stopped(pid: int) -> bool:
    try:
        return processes.Stat(pid).state in "Tt"
    except OSError:
        return False


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _written(each: _Writing) -> str:
    try:
        with Path(each.path).open("rb") as stream:
            stream.seek(each.before)
            text = stream.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return "(the process has ended)\n"
    return text or "(the process did not write its stacks: it is stopped, or hangs in the kernel)\n"
