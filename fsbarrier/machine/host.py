"""What tells this host from others."""

from __future__ import annotations

import socket
from pathlib import Path


def boot_id() -> str:
    """What tells this host, since its last boot, from every other; the host's name where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
