"""What this process's container or job may use: memory and processes, by its control groups (v1 and v2), Slurm and ulimit. Never raises."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MIB = 1024**2


def memory_bytes() -> tuple[int, str]:
    """The memory that this process may use, and what sets this limit: the least of the host's, its control groups' and the Slurm job's."""
    found = [(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine")]
    found += [
        (limit, str(file)) for file, limit in _limits("memory", ("memory.max", "memory.limit_in_bytes"))
    ]
    with contextlib.suppress(KeyError, ValueError):
        found.append((int(os.environ["SLURM_MEM_PER_NODE"]) * MIB, "SLURM_MEM_PER_NODE"))
    return min(each for each in found if each[0] > 0)


def processes_left() -> tuple[int | None, str]:
    """How many more processes and threads this process may start, and what sets this limit; None: no limit."""
    found: list[tuple[int, str]] = []
    for file, limit in _limits("pids", ("pids.max",)):
        with contextlib.suppress(OSError, ValueError):
            found.append((max(0, limit - int(file.with_name("pids.current").read_text())), str(file)))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not apply this limit to root.
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        found.append((max(0, soft - _of_this_user()), "ulimit -u"))
    return min(found, default=(None, ""), key=lambda each: each[0] or 0)


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
