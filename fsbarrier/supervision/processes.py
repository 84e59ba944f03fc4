"""Processes by identity: (pid, start time), never by name. Finds what descends from a process, signals exactly what it found.

Standard library only, and little of it: `guard.py` loads this file by path at every start of a program.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing `typing` would cost the guard 5 ms
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
else:
    try:
        import _signal as signal  # the same functions without the enums, which cost 5 ms
    except ImportError:
        import signal

FREEZE_PASSES = 100  # far more than any tree needs: every pass stops all the forkers it sees


class Stat:
    """What /proc/PID/stat says of a process; `start` (clock ticks since boot) makes its pid unambiguous."""

    __slots__ = ("pgid", "ppid", "session", "start", "state")

    def __init__(self, pid: int) -> None:
        """Raises OSError where there is no such process, or it is hidden from us."""
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(fd, 4096).rpartition(b")")[2].split()
        finally:
            os.close(fd)
        if len(fields) < 20:
            raise ProcessLookupError(pid)
        self.state = fields[0].decode()
        self.ppid, self.pgid, self.session = int(fields[1]), int(fields[2]), int(fields[3])
        self.start = int(fields[19])


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
                continue  # it ended meanwhile, or is somebody else's
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
        pidfd = open_pidfd(pid)  # before the check, so that the pid cannot change hands between the two
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
    """Stop what `find` gives until that is nothing new (so that nobody forks on), then SIGKILL it all.

    Gives what was hit, as pid -> start time. A fork under way may be missed: call it until nothing is left.
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


def alive(tree: Mapping[int, int]) -> dict[int, int]:
    """Those of `tree` (pid -> start time) that have not ended."""
    found = {}
    for pid, start in tree.items():
        try:
            stat = Stat(pid)
        except OSError:
            continue
        if stat.start == start and stat.state not in "ZX":
            found[pid] = start
    return found
