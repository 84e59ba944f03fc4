"""Finds and signals processes, identified by (pid, start time).

A pid alone may be reused; together with the start time it is unambiguous until the next boot. Uses only a small part of
the standard library, because `guard.py` loads this file by path at every start of a program.
"""

from __future__ import annotations

import os

# Importing `typing` would cost the guard 5 ms; type checkers know this constant too.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
else:
    try:
        # The same functions without the enums, whose import costs 5 ms.
        import _signal as signal
    except ImportError:
        import signal

# The name of a program's guard, in the environment of the program and of everything below it.
GUARD_VARIABLE = "FSBARRIER_GUARD"
# More than any tree needs: each pass stops all processes found so far.
FREEZE_PASSES = 100


class Stat:
    """The fields of /proc/PID/stat. `start` is in clock ticks since boot."""

    __slots__ = ("ppid", "session", "start", "state")

    def __init__(self, pid: int) -> None:
        """Raises OSError if the process does not exist or is hidden from us."""
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Skip the program name, which may contain spaces and brackets itself.
            fields = os.read(fd, 4096).rpartition(b")")[2].split()
        finally:
            os.close(fd)
        if len(fields) < 20:
            raise ProcessLookupError(pid)
        self.state = fields[0].decode()
        self.ppid, self.session = int(fields[1]), int(fields[3])
        self.start = int(fields[19])

    @property
    def ended(self) -> bool:
        """Whether it is a zombie (Z) or being removed (X)."""
        return self.state in "ZX"


def scope() -> str:
    """Where a pid and start time mean one process: this boot of this host, and this pid namespace."""
    fd = os.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return f"{os.read(fd, 64).decode().strip()}/{os.readlink('/proc/self/ns/pid')}"
    finally:
        os.close(fd)


def own_name() -> str:
    """This process's name, unambiguous everywhere."""
    return f"{scope()}/{os.getpid()}/{Stat(os.getpid()).start}"


def scan() -> dict[int, Stat]:
    """All processes in /proc, including zombies; {} without a /proc."""
    stats: dict[int, Stat] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return stats
    for name in names:
        if name.isdigit():
            try:
                stats[int(name)] = Stat(int(name))
            except OSError:
                # It has ended, or belongs to another user.
                continue
    return stats


def below(root: int, processes: dict[int, Stat] | None = None) -> dict[int, int]:
    """The descendants of `root` (without `root`) as pid -> start time, including zombies."""
    processes = scan() if processes is None else processes
    children: dict[int, list[int]] = {}
    for pid, stat in processes.items():
        children.setdefault(stat.ppid, []).append(pid)
    descendants: dict[int, int] = {}
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in descendants and pid != root:
                descendants[pid] = processes[pid].start
                todo.append(pid)
    return descendants


def open_pidfd(pid: int) -> int:
    """A pidfd, which becomes readable when the process ends; -1 if the kernel, Python or a seccomp filter does not support it.

    Raises ProcessLookupError if there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return -1


def send(pid: int, start: int, number: int) -> bool:
    """Signal exactly the process (pid, start); False if it is gone or we may not signal it."""
    pidfd = -1
    try:
        # Open the pidfd before the check, so that it refers to one process even if the pid is reused.
        pidfd = open_pidfd(pid)
        if Stat(pid).start != start:
            return False
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, number)
        else:
            os.kill(pid, number)
    except OSError:
        return False
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return True


def freeze_and_kill(find: Callable[[], dict[int, int]]) -> dict[int, int]:
    """Stop the processes that `find` returns until it finds no new ones, then SIGKILL them all; returns them as pid -> start time.

    Killing one process while its sibling forks would miss the new process. Stopped processes cannot fork, so all are stopped
    first. A fork in progress when its process was stopped may still be missed: repeat the call until nothing is left.
    """
    frozen: dict[int, int] = {}
    for _ in range(FREEZE_PASSES):
        new = {pid: start for pid, start in find().items() if frozen.get(pid) != start}
        if not new:
            break
        for pid, start in new.items():
            send(pid, start, signal.SIGSTOP)
        frozen.update(new)
    for pid, start in frozen.items():
        send(pid, start, signal.SIGKILL)
    return frozen
