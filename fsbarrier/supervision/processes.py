"""Processes by identity: (pid, start time), never by name. Finds what descends from a process, signals exactly what it found.

A pid alone may belong to another process a moment later; with the start time it is unambiguous until the next boot.
Standard library only, and little of it: `guard.py` loads this file by its path at every start of a program.
"""

from __future__ import annotations

import os

# Importing `typing` would cost the guard 5 ms, so the constant that type checkers know stands here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
else:
    try:
        # The same functions without the enums, which cost 5 ms.
        import _signal as signal
    except ImportError:
        import signal

# Far more than any tree needs: after every pass, all the forkers that were seen are stopped.
FREEZE_PASSES = 100


class Stat:
    """What /proc/PID/stat says of a process. `start` is in clock ticks since boot."""

    __slots__ = ("ppid", "session", "start", "state")

    def __init__(self, pid: int) -> None:
        """Raises OSError where there is no such process, or it is hidden from us."""
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Before the last bracket stands the program's name, which may hold spaces and brackets itself.
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
        """Whether it is a zombie (Z) or has just ceased to be one (X)."""
        return self.state in "ZX"


def scan() -> dict[int, Stat]:
    """Every process that /proc shows, zombies included; {} without a /proc."""
    found: dict[int, Stat] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                found[int(name)] = Stat(int(name))
            except OSError:
                # It ended meanwhile, or is somebody else's.
                continue
    return found


def below(root: int, processes: dict[int, Stat] | None = None) -> dict[int, int]:
    """The descendants of `root` (without itself) as pid -> start time, zombies included."""
    processes = scan() if processes is None else processes
    children: dict[int, list[int]] = {}
    for pid, stat in processes.items():
        children.setdefault(stat.ppid, []).append(pid)
    found: dict[int, int] = {}
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found and pid != root:
                found[pid] = processes[pid].start
                todo.append(pid)
    return found


def alive(tree: Mapping[int, int]) -> dict[int, int]:
    """Those of `tree` (pid -> start time) that have not ended."""
    found = {}
    for pid, start in tree.items():
        try:
            stat = Stat(pid)
        except OSError:
            continue
        if stat.start == start and not stat.ended:
            found[pid] = start
    return found


def open_pidfd(pid: int) -> int:
    """A pidfd, readable once the process has ended; -1 where the kernel, Python or a seccomp filter has none.

    Raises ProcessLookupError where there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return -1


def send(pid: int, start: int, number: int) -> bool:
    """Signal exactly the process born as (pid, start); False where it is gone or not ours to signal."""
    pidfd = -1
    try:
        # Opened before the check: from then on it means one process, even if the pid changes hands.
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
    """Stop what `find` gives until it gives nothing new, then SIGKILL it all; gives what was hit, as pid -> start time.

    A process that is killed while its sibling forks leaves the new one behind. A stopped process cannot fork, so all are
    stopped first. A fork that was under way when its process was stopped may be missed: call this until nothing is left.
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
