"""Checks whether a run directory or a pool may be trusted, since anybody who can write to it decides which code its nodes run.

The rule is that of sshd's StrictModes for ~/.ssh: the folder and all folders above it must belong to this user or to root, and nobody else
may write there. A sticky folder such as /tmp may be above it, because users cannot rename each other's files in it.
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
#: the number of user ids in the uid_map of a machine that maps no users
_ALL = "4294967295"
#: the most links that the kernel follows in a path
MAX_LINKS = 40


def check(
    folder: Path, *, shared_group: bool, trust_mount: bool = False, named: str, inside: Iterable[str] = ()
) -> None:
    """Raises UsageError if another user could change what is in `folder`, which need not exist yet.

    `shared_group`: the command line lets the folder's group write, if this user is in the group. The folder's owner is checked all the
    same, because a stranger can make a folder that belongs to any group of theirs. `trust_mount`: the command line says that nobody else
    can reach a mount that sets all modes itself, so that modes say nothing. `named`: the flag or command to show in messages. `inside`: the
    names in the folder that must be trusted too, if they exist.
    """
    real = Path(os.path.realpath(folder))
    existing = next(path for path in (real, *real.parents) if path.exists())
    trusted = {os.geteuid(), 0}
    if mount_of(existing).family.category != LOCAL and os.stat(existing).st_uid not in trusted:
        # A file server may map user ids. Then the owner that a new file of ours gets there stands for this user.
        trusted.add(owner_at(existing))
    way = [path for path in (real, *(real / name for name in inside)) if os.path.lexists(path)]
    for path in way:
        _check(path, trusted, shared_group, trust_mount, f"{named} {folder}")
    for path in _on_the_way(folder):
        _check(path, trusted | _not_mapped(), shared_group, trust_mount, f"{named} {folder}", sticky=True)


def _on_the_way(path: Path) -> Iterator[Path]:
    """Yield the folders and links that the kernel passes on the way to `path`. A link counts because its owner can redirect it later."""
    current, names, links = Path("/"), [*reversed(Path(os.path.abspath(path)).parts[1:])], 0
    while names and os.path.lexists(current):
        yield current
        current = current.parent if (name := names.pop()) == ".." else current / name
        if current.is_symlink() and links < MAX_LINKS:
            yield current
            target, links = Path(os.readlink(current)), links + 1
            names += reversed([part for part in target.parts if part != "/"])
            current = Path("/") if target.is_absolute() else current.parent


def _check(
    path: Path, trusted: set[int], shared_group: bool, trust_mount: bool, named: str, *, sticky: bool = False
) -> None:
    status = os.lstat(path)
    # What a link leads to says nothing about who may redirect the link.
    if trust_mount and not stat.S_ISLNK(status.st_mode) and modes_are_forced(path):
        return
    # A link's own mode means nothing.
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
        problem = f"{named}: its group may write to {path} and could run code as you; run chmod g-w {path}"
        if not shared_group:
            raise UsageError(
                f"{problem}, or give --shared-group if you trust everybody in its group with your account"
            )
        if status.st_gid not in {os.getegid(), *os.getgroups()}:
            raise UsageError(f"{problem} (--shared-group trusts only a group that you are in)")


def modes_are_forced(path: Path) -> bool:
    """Whether the mount of `path` sets all modes itself, so that a folder made for its owner alone gets a different mode."""
    folder = path if path.is_dir() else path.parent
    if not stat.S_IMODE(os.stat(folder).st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    try:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            # An error is ignored: some clients ignore a change of the mode, others refuse it.
            with contextlib.suppress(OSError):
                os.chmod(made, stat.S_IRWXU)
            return bool(os.stat(made).st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return False


def _options_for(path: Path) -> str:
    """Advice: the mount options with which only this user can write."""
    owner = f"uid={os.geteuid()},gid={os.getegid()}"
    if mount_of(path).kind.lower().startswith(("cifs", "smb")):
        return f"mount it with {owner},dir_mode=0700,file_mode=0600 (Kubernetes: mountOptions of the volume)"
    return f"mount it with {owner},umask=077 or what this client calls them (SMB and Azure Files: {owner},dir_mode=0700,file_mode=0600)"


def _is_only_ours(group: int) -> bool:
    """Whether a group is this user's own and has no other members. Many systems make such a group for each user."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (user.pw_gid, user.pw_name) == (group, entry.gr_name) and not {*entry.gr_mem} - {user.pw_name}


def owner_at(folder: Path) -> int:
    """The user id that owns a new file in this folder, which shows how a server maps this user. -1: no file can be made."""
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            return os.fstat(made.fileno()).st_uid
    except OSError:
        return -1


def user_name(uid: int) -> str:
    """A user's name and id, for messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (user id {uid})"
    except KeyError:
        return f"user id {uid}"


def _not_mapped() -> set[int]:
    """The user id that the host's root has in a container that maps only its own user, such as Apptainer's; empty elsewhere."""
    try:
        return set() if _ALL in _UID_MAP.read_text().split() else {int(_OVERFLOW.read_text())}
    except (OSError, ValueError):
        return set()
