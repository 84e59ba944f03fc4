"""The folder of this machine that only this user can enter: for locks, sockets, and what one program tells another.

A temporary directory belongs to everybody, and names in it can be foreseen. Whoever makes such a name first decides what lies there, so
nothing of ours lies in it directly, and a folder of that name counts only where it is this user's own.
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

from fsbarrier.host.identity import host_name


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """`passed_over`: why a better place is not used, naming whose it is; "" where the first one was free."""

    path: Path
    passed_over: str = ""


def private_folder() -> PrivateFolder:
    """The folder, made if need be. Raises OSError where none of the places can be used."""
    problems: list[str] = []
    for path in _places():
        try:
            problem = _make_private(path)
        except OSError as error:
            problem = f"{path}: {error.strerror or error}"
        if not problem:
            return PrivateFolder(path, "; ".join(problems))
        problems.append(problem)
    raise PermissionError(f"no private folder can be made: {'; '.join(problems)}")


def _places() -> Iterator[Path]:
    """The temporary directory comes first: what a login session gives (XDG) goes away with the session, and daemons outlive theirs."""
    yield Path(tempfile.gettempdir()) / f"fsbarrier-{os.geteuid()}"
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(given) / "fsbarrier"
    # In a container a user may have a number and no home. A home may be shared by machines.
    with contextlib.suppress(RuntimeError):
        yield Path.home() / ".fsbarrier" / host_name()


def _make_private(path: Path) -> str:
    """Make the folder, or see that it is ours alone; says why it is not. Raises OSError."""
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
        return f"{path} is no folder"
    if found.st_mode & 0o077:
        return f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (user {uid})"
    except KeyError:
        return f"user {uid}"
