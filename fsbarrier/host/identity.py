"""Who this process is, as other hosts get to see it: the host's name and boot, and the user's name."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path


def host_name() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """What tells this host, since its last boot, from every other; the host's name where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return host_name()


def user_at_host() -> str:
    """Who is doing something, for those who read of it elsewhere."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container a user may have a number and no name.
        user = f"uid{os.getuid()}"
    return f"{user}@{host_name()}"
