"""Machines and accounts other than a developer's own. To add one, add one line to PLACES: each runs the same toy run.

A place changes what the command is started with; `needs` names what this machine must have for it, else the test is skipped.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Place:
    #: added to the environment; None: removed
    environ: Mapping[str, str | None] = field(default_factory=dict)
    #: done in the child before the command starts
    before: Callable[[], object] = lambda: None
    #: the user id that it runs as; only root can give another one
    user: int | None = None
    #: run every day; the others are slow
    daily: bool = False
    needs: Callable[[], str] = lambda: ""
    #: the working folder, in which the run directory is
    folder: str = "here"
    #: a command that the command is given to
    within: tuple[str, ...] = ()


def _limited(which: int, most: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(which, (most, most))


def _root() -> str:
    return (
        ""
        if os.geteuid() == 0 and shutil.which("setpriv")
        else "only root with setpriv can become another user"
    )


def _mounts() -> str:
    return _root() or ("" if shutil.which("unshare") else "no unshare on this machine")


def mounted_over(path: str, options: str) -> tuple[str, ...]:
    """A command that runs another one with a small tmpfs at `path`, which nobody else sees."""
    script = f'mount -t tmpfs -o {options} tmpfs {path} && exec "$@"'
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")


def _faketime() -> str:
    return "" if _FAKETIME.exists() else "no libfaketime on this machine (Debian: libfaketime)"


_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
NOBODYS = 64123
PROXY = "http://me:hunter2@proxy.invalid:3128"

PLACES = {
    "no name": Place(user=NOBODYS, environ={"USER": None, "LOGNAME": None}, needs=_root, daily=True),
    "no home": Place(environ={"HOME": "/nonexistent"}),
    "no HOME, no name": Place(
        user=NOBODYS, environ={"HOME": None, "USER": None, "LOGNAME": None}, needs=_root
    ),
    "read-only home": Place(user=NOBODYS, environ={"HOME": "/proc"}, needs=_root),
    "umask 000": Place(before=lambda: os.umask(0o000)),
    "umask 002": Place(before=lambda: os.umask(0o002)),
    "umask 077": Place(before=lambda: os.umask(0o077)),
    "umask 177": Place(before=lambda: os.umask(0o177)),
    "64 descriptors": Place(before=_limited(resource.RLIMIT_NOFILE, 64), daily=True),
    "300 processes": Place(user=NOBODYS, before=_limited(resource.RLIMIT_NPROC, 300), needs=_root),
    "a /dev/shm of 1 MiB": Place(within=mounted_over("/dev/shm", "size=1m"), needs=_mounts),
    "a read-only /dev/shm": Place(within=mounted_over("/dev/shm", "ro"), needs=_mounts),
    "no /etc/passwd": Place(within=mounted_over("/etc", "size=1m"), needs=_mounts),
    "a proxy": Place(environ={"http_proxy": PROXY, "HTTPS_PROXY": PROXY, "ALL_PROXY": PROXY}),
    "LD_PRELOAD of nothing": Place(environ={"LD_PRELOAD": "/nonexistent/lib.so"}),
    "a locale without UTF-8": Place(
        environ={"LC_ALL": "C", "LANG": None, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ),
    "an unknown locale": Place(environ={"LC_ALL": "xx_YY.ISO-8859-1"}),
    "a clock two hours off": Place(
        environ={"LD_PRELOAD": str(_FAKETIME), "FAKETIME": "-2h"}, needs=_faketime
    ),
    "a path with everything": Place(folder="a b'c\"d$e;f&g\\h é\U0001f600 {x} %s *?[z] #", daily=True),
    "an empty environment": Place(environ={"PATH": None, "TERM": None, "SHELL": None}),
    "an outer torchrun": Place(
        environ={"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "nowhere.invalid:1"}
    ),
}
