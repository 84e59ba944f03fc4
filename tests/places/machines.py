"""Machines and accounts other than a developer's own. To add one, add one line to PLACES: each runs the same toy run.

A place changes what the command is started with; `needs` names what this machine must have for it, else the test is skipped.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


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


def _limited(which: int, most: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(which, (most, most))


def _root() -> str:
    return (
        ""
        if os.geteuid() == 0 and shutil.which("setpriv")
        else "only root with setpriv can become another user"
    )


NOBODYS = 64123

PLACES = {
    "no name": Place(user=NOBODYS, environ={"USER": None, "LOGNAME": None}, needs=_root, daily=True),
    "no home": Place(environ={"HOME": "/nonexistent"}),
    "umask 000": Place(before=lambda: os.umask(0o000)),
    "umask 002": Place(before=lambda: os.umask(0o002)),
    "umask 077": Place(before=lambda: os.umask(0o077)),
    "umask 177": Place(before=lambda: os.umask(0o177)),
    "64 descriptors": Place(before=_limited(resource.RLIMIT_NOFILE, 64), daily=True),
}
