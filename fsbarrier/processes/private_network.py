"""Checks whether this host allows private networks for programs, and whether it has other users from whom they would protect.

A private network is a network namespace with only a loopback. It needs no root if user namespaces are allowed. guard.py makes it.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fsbarrier.processes import guard

#: user ids of people; lower ones are the system's, and higher ones include `nobody`
PEOPLE = range(1000, 65_000)
PROBE_S = 30.0
NO_LOGIN = ("nologin", "false", "sync")


def why_not() -> str:
    """Why this host does not allow private networks; "" if it does."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", guard.__file__, guard.PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.splitlines() or ["it failed"])[-1]


def others_may_be_here() -> bool:
    """Whether people other than this user have an account on this host, or a process: in a container, or on a node of one's own, nobody
    does."""
    own = {os.geteuid(), os.getuid()}
    accounts = {one.pw_uid for one in pwd.getpwall() if not one.pw_shell.endswith(NO_LOGIN)}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal():
                accounts.add(entry.stat().st_uid)
    return any(uid in PEOPLE for uid in accounts - own)
