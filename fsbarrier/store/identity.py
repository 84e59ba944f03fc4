"""Host name, boot id and user name, as shown to other hosts."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path


def host_name() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """A unique id of this host's current boot; the host name if the kernel provides none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return host_name()


def user_at_host() -> str:
    """USER@HOST, for records that are read elsewhere."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container a user may have no name.
        user = f"uid{os.getuid()}"
    return f"{user}@{host_name()}"
