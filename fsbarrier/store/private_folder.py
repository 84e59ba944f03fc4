"""A local folder that only this user can enter, for locks, sockets and files exchanged between programs.

Names in a temporary directory are predictable, so another user could create them first. Our files are therefore only placed in a
subfolder that is verified to belong to this user.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.store.identity import host_name


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """`passed_over`: why a preferred place is not used, including its owner; "" if the first place was usable."""

    path: Path
    passed_over: str = ""


def private_folder() -> PrivateFolder:
    """The folder, created if necessary. Raises OSError if none of the places is usable."""
    problems: list[str] = []
    for path in _places():
        try:
            problem = _make_private(path)
        except OSError as error:
            problem = f"{path}: {error.strerror or error}"
        if not problem:
            return PrivateFolder(path, "; ".join(problems))
        problems.append(problem)
    raise PermissionError(f"cannot create a private folder: {'; '.join(problems)}")


def _places() -> Iterator[Path]:
    """The candidate places. The temporary directory comes first, because XDG_RUNTIME_DIR is removed with the login session and daemons
    outlive it."""
    yield Path(tempfile.gettempdir()) / f"fsbarrier-{os.geteuid()}"
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(given) / "fsbarrier"
    # In a container a user may have no home. A home may be shared between machines.
    with contextlib.suppress(RuntimeError):
        yield Path.home() / ".fsbarrier" / host_name()


def _make_private(path: Path) -> str:
    """Create the folder, or verify that it is private to us; returns the problem, or "". Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        os.mkdir(path.parent, 0o700)
        os.mkdir(path, 0o700)
    found = path.lstat()
    if found.st_uid != os.geteuid():
        return f"{path} belongs to {_user_name(found.st_uid)}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_mode & 0o077:
        return f"{path} is accessible to other users (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (user {uid})"
    except KeyError:
        return f"user {uid}"
