"""The memory of this machine, and how much of it is available. Never raises."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from fsbarrier.store.mounts import mount_of

# Linux's shared in-memory filesystem.
SHARED_MEMORY = Path("/dev/shm")
# In-memory filesystems, and the share of available memory that files there may use.
IN_MEMORY, FILLED = ("tmpfs", "ramfs"), 0.5
CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(folder: Path) -> int:
    """How many bytes may be written below `folder`: the free space on a disk, or at most half of the memory available to this process."""
    try:
        free = shutil.disk_usage(folder).free
        kind = mount_of(folder).kind
    except OSError:
        return 0
    return min(free, int(_available() * FILLED)) if kind in IN_MEMORY else free


def _available() -> int:
    """Available memory according to the host, and to the limit of this process's container or job (cgroup v2), if any."""
    available = 0
    with contextlib.suppress(OSError, ValueError, KeyError):
        available = _numbers(Path("/proc/meminfo"))["MemAvailable"] << 10
        own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        # In a container the outermost visible cgroup is its own.
        group = CGROUPS / own if (CGROUPS / own / "memory.max").exists() else CGROUPS
        limit = int((group / "memory.max").read_text())
        counts = _numbers(group / "memory.stat")
        cached = counts["active_file"] + counts["inactive_file"]
        used = int((group / "memory.current").read_text()) - cached
        available = min(available, limit - used)
    return max(0, available)


def _numbers(file: Path) -> dict[str, int]:
    """Parse the lines NAME NUMBER, or NAME: NUMBER UNIT, of a kernel file."""
    words = [line.split() for line in file.read_text().splitlines()]
    return {name.rstrip(":"): int(number) for name, number, *_ in words}
