"""What this process's container or job may use: memory and processes, by its control groups (v1 and v2), Slurm and ulimit; and how much of
that memory is still available for files. Never raises."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from fsbarrier.store.mounts import mount_of

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MIB = 1024**2
#: the file of a control group's memory limit, in v2 and v1 -> the file of the memory in use
MEMORY_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
# Linux's shared in-memory filesystem.
SHARED_MEMORY = Path("/dev/shm")
# In-memory filesystems, and the share of available memory that files there may use.
IN_MEMORY, FILLED = ("tmpfs", "ramfs"), 0.5


def memory_bytes() -> tuple[int, str]:
    """The memory that this process may use, and what sets this limit: the least of the host's, its control groups' and the Slurm job's."""
    limits = [(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine")]
    limits += [(limit, str(file)) for file, limit in _limits("memory", tuple(MEMORY_FILES))]
    with contextlib.suppress(KeyError, ValueError):
        limits.append((int(os.environ["SLURM_MEM_PER_NODE"]) * MIB, "SLURM_MEM_PER_NODE"))
    return min(each for each in limits if each[0] > 0)


def processes_left() -> tuple[int | None, str]:
    """How many more processes and threads this process may start, and what sets this limit; None: no limit."""
    limits: list[tuple[int, str]] = []
    for file, limit in _limits("pids", ("pids.max",)):
        with contextlib.suppress(OSError, ValueError):
            limits.append((max(0, limit - int(file.with_name("pids.current").read_text())), str(file)))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not apply this limit to root.
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append((max(0, soft - _of_this_user()), "ulimit -u"))
    return min(limits, default=(None, ""), key=lambda each: each[0] or 0)


def _of_this_user() -> int:
    """How many threads this user's processes have."""
    count, user = 0, os.geteuid()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _limits(controller: str, names: tuple[str, ...]) -> Iterator[tuple[Path, int]]:
    """The limits of this process's control groups, from its own to the outermost that it can see."""
    for group in _groups(controller):
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                # "max" is no limit; v1 writes a number beyond any memory instead.
                yield group / name, int((group / name).read_text())


def _groups(controller: str) -> Iterator[Path]:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = OWN.read_text().splitlines()
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            root = CGROUPS
        elif controller in controllers.split(","):
            root = CGROUPS / controller
        else:
            continue
        # In a container the outermost visible group is its own, whatever its path says.
        own = root / path.strip("/")
        while own != root and root in own.parents:
            yield own
            own = own.parent
        yield root


def free_bytes(folder: Path) -> int:
    """How many bytes may be written below `folder`: the free space on a disk, or at most half of the memory available to this process."""
    try:
        free = shutil.disk_usage(folder).free
        kind = mount_of(folder).kind
    except OSError:
        return 0
    return min(free, int(_available() * FILLED)) if kind in IN_MEMORY else free


def _available() -> int:
    """Available memory by the host, and by the limits of this process's container or job, if any."""
    available = 0
    with contextlib.suppress(OSError, ValueError, KeyError):
        available = _numbers(Path("/proc/meminfo"))["MemAvailable"] << 10
    for file, limit in _limits("memory", tuple(MEMORY_FILES)):
        with contextlib.suppress(OSError, ValueError, KeyError):
            counts = _numbers(file.with_name("memory.stat"))
            # The kernel gives these pages up when memory runs short. In v1 only the totals include the groups inside this one.
            cached = sum(
                counts.get(f"total_{name}", counts[name]) for name in ("active_file", "inactive_file")
            )
            used = int(file.with_name(MEMORY_FILES[file.name]).read_text()) - cached
            available = min(available, limit - used)
    return max(0, available)


def _numbers(file: Path) -> dict[str, int]:
    """Parse the lines NAME NUMBER, or NAME: NUMBER UNIT, of a kernel file."""
    words = [line.split() for line in file.read_text().splitlines()]
    return {name.rstrip(":"): int(number) for name, number, *_ in words}
