"""The memory of this machine, and how much of it programs may still take. Nothing here fails."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from fsbarrier.host.mounts import mount_of

# Where Linux has a filesystem in memory for all programs.
SHARED_MEMORY = Path("/dev/shm")
# Filesystems whose files lie in memory, and how much of what is left there one may fill: programs need memory too.
IN_MEMORY, FILLED = ("tmpfs", "ramfs"), 0.5
CGROUPS = Path("/sys/fs/cgroup")


def host_memory() -> tuple[int, int]:
    """The host's memory, and how much of it is free or can be made so; zeros where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = _numbers(Path("/proc/meminfo"))
        return fields["MemTotal"] << 10, fields["MemAvailable"] << 10
    return 0, 0


def free_bytes(folder: Path) -> int:
    """How much may be written below `folder`: on a disk what is free, in memory at most half of what this process may still take."""
    try:
        free = shutil.disk_usage(folder).free
        kind = mount_of(folder).kind
    except OSError:
        return 0
    return min(free, int(_available() * FILLED)) if kind in IN_MEMORY else free


def _available() -> int:
    """By the host, and by the limit of the container or job (cgroup v2) that this process runs in, if there is one."""
    available = host_memory()[1]
    with contextlib.suppress(OSError, ValueError, KeyError):
        own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        # In a container the outermost one seen is its own.
        group = CGROUPS / own if (CGROUPS / own / "memory.max").exists() else CGROUPS
        limit = int((group / "memory.max").read_text())
        counts = _numbers(group / "memory.stat")
        cached = counts["active_file"] + counts["inactive_file"]
        used = int((group / "memory.current").read_text()) - cached
        available = min(available, limit - used)
    return max(0, available)


def _numbers(file: Path) -> dict[str, int]:
    """The lines NAME NUMBER, or NAME: NUMBER UNIT, of one of the kernel's files."""
    words = [line.split() for line in file.read_text().splitlines()]
    return {name.rstrip(":"): int(number) for name, number, *_ in words}
