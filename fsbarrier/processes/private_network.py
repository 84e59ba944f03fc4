"""Whether programs of this host can have a network of their own, and whether there are other users from whom it would keep them.

A program with a network of its own is in a network namespace with nothing but a loopback, which needs no root where user namespaces are
allowed. guard.py makes it.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fsbarrier.processes import guard

#: user ids that people have: below are the system's own, above are those that stand for nobody
PEOPLE = range(1000, 65_000)
PROBE_S = 30.0
NO_LOGIN = ("nologin", "false", "sync")


def why_not() -> str:
    """Why this host gives programs no network of their own; "" if it does."""
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
