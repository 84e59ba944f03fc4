"""Whether a run directory or a pool may be trusted: whoever can write to it decides which code its nodes run.

As sshd's StrictModes does for ~/.ssh: the folder and everything on the way to it belong to this user or to root, and nobody else may write
there. A sticky folder such as /tmp may be on the way, because only its owner can rename what others made in it.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.store.mounts import LOCAL, mount_of

_UID_MAP, _OVERFLOW = Path("/proc/self/uid_map"), Path("/proc/sys/fs/overflowuid")
#: how many user ids a machine has whose users are not mapped
_ALL = "4294967295"
#: as many as the kernel follows
MAX_LINKS = 40


def check(
    folder: Path, *, shared_group: bool, trust_mount: bool = False, named: str, inside: Iterable[str] = ()
) -> None:
    """Raises UsageError if somebody else could decide what is in `folder`, which need not exist yet.

    `shared_group`: this command line lets the folder's group write, if this user is in it; whose the folder is counts all the same, because
    a stranger can make a folder of a stranger's group. `trust_mount`: this command line says that nobody else reaches a mount whose modes
    say nothing, because the mount itself sets them. `named`: the flag or command to show.
    `inside`: what must be trusted too, if it is there.
    """
    real = Path(os.path.realpath(folder))
    there = next(path for path in (real, *real.parents) if path.exists())
    trusted = {os.geteuid(), 0}
    if mount_of(there).family.category != LOCAL and os.stat(there).st_uid not in trusted:
        # A file server may map users: then whoever owns what we make there is us.
        trusted.add(owner_at(there))
    way = [path for path in (real, *(real / name for name in inside)) if os.path.lexists(path)]
    for path in way:
        if not (trust_mount and modes_are_forced(path)):
            _check(path, trusted, shared_group, f"{named} {folder}")
    for path in _on_the_way(folder):
        if not (trust_mount and modes_are_forced(path)):
            _check(path, trusted | _not_mapped(), shared_group, f"{named} {folder}", sticky=True)


def _on_the_way(path: Path) -> Iterator[Path]:
    """The folders through which the kernel comes to `path`, and the links: whoever made one can let it lead elsewhere later."""
    current, names, links = Path("/"), [*reversed(Path(os.path.abspath(path)).parts[1:])], 0
    while names and os.path.lexists(current):
        yield current
        current = current.parent if (name := names.pop()) == ".." else current / name
        if current.is_symlink() and links < MAX_LINKS:
            yield current
            target, links = Path(os.readlink(current)), links + 1
            names += reversed([part for part in target.parts if part != "/"])
            current = Path("/") if target.is_absolute() else current.parent


def _check(path: Path, trusted: set[int], shared_group: bool, named: str, *, sticky: bool = False) -> None:
    status = os.lstat(path)
    # What a link's mode says means nothing.
    mode = 0 if stat.S_ISLNK(status.st_mode) or (sticky and status.st_mode & stat.S_ISVTX) else status.st_mode
    if mode & (stat.S_IWOTH | stat.S_IWGRP) and modes_are_forced(path):
        raise UsageError(
            f"{named}: {path} has mode {stat.S_IMODE(mode):04o}, by which others could run code as you, and chmod cannot change it: "
            f"{mount_of(path)} sets all modes itself; {_options_for(path)}, or give --trust-mount if nobody else can write to this export"
        )
    if mode & stat.S_IWOTH:
        raise UsageError(
            f"{named}: everybody may write to {path} and could run code as you; run chmod o-w {path}"
        )
    if status.st_uid not in trusted:
        raise UsageError(
            f"{named}: {path} belongs to {user_name(status.st_uid)}, who could run code as you; use a directory of your own"
        )
    if mode & stat.S_IWGRP and not _is_only_ours(status.st_gid):
        said = f"{named}: its group may write to {path} and could run code as you; run chmod g-w {path}"
        if not shared_group:
            raise UsageError(
                f"{said}, or give --shared-group if you trust everybody in its group with your account"
            )
        if status.st_gid not in {os.getegid(), *os.getgroups()}:
            raise UsageError(f"{said} (--shared-group trusts only a group that you are in)")


def modes_are_forced(path: Path) -> bool:
    """Whether the mount of `path` shows modes of its own for everything: a folder that is made for its owner alone comes out otherwise."""
    folder = path if path.is_dir() else path.parent
    if not stat.S_IMODE(os.stat(folder).st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    try:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            # Without an error either: some clients ignore a change of the mode, others refuse it.
            with contextlib.suppress(OSError):
                os.chmod(made, stat.S_IRWXU)
            return bool(os.stat(made).st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return False


def _options_for(path: Path) -> str:
    """The mount options with which only this user can write."""
    owner = f"uid={os.geteuid()},gid={os.getegid()}"
    if mount_of(path).kind.lower().startswith(("cifs", "smb")):
        return f"mount it with {owner},dir_mode=0700,file_mode=0600 (Kubernetes: mountOptions of the volume)"
    return f"mount it with {owner},umask=077 or what this client calls them (SMB and Azure Files: {owner},dir_mode=0700,file_mode=0600)"


def _is_only_ours(group: int) -> bool:
    """Whether it is the user's own group without other members, which many systems make for each user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (user.pw_gid, user.pw_name) == (group, found.gr_name) and not {*found.gr_mem} - {user.pw_name}


def owner_at(folder: Path) -> int:
    """Whom a new file in this folder belongs to: on a server that maps users, that is who we are there. -1: none can be made."""
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            return os.fstat(made.fileno()).st_uid
    except OSError:
        return -1


def user_name(uid: int) -> str:
    """For messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (user id {uid})"
    except KeyError:
        return f"user id {uid}"


def _not_mapped() -> set[int]:
    """Who the host's root looks like in a container that maps only its own user (as Apptainer's)."""
    try:
        return set() if _ALL in _UID_MAP.read_text().split() else {int(_OVERFLOW.read_text())}
    except (OSError, ValueError):
        return set()
