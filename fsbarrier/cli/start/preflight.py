"""Where things are: the paths that a user names, the default ones, and whether a directory can be written to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import fsbarrier
from fsbarrier.errors import UsageError
from fsbarrier.settings.sources import DATA_ON_HUB, ChosenValue
from fsbarrier.settings.value_types import reward_kinds
from fsbarrier.store.mounts import mount_of

Environ = Mapping[str, str]
FREE_BYTES = 16 * 1024 * 1024
# Filesystems that do not support user files.
NO_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts")


def checkout() -> Path | None:
    """The clone that this package runs from; None if it is installed."""
    root = Path(fsbarrier.__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def default_log_path(environ: Environ) -> Path:
    """$FSBARRIER_LOG_PATH, else runs/default in the clone (or in the current directory if there is no clone).

    In a clone whose runs/ is another user's, or that this user cannot write to: fsbarrier-runs/default in the home directory.
    """
    if named := environ.get("FSBARRIER_LOG_PATH", "").strip():
        return absolute(named)
    base = checkout() or Path.cwd()
    there = base / "runs" if (base / "runs").is_dir() else base
    if os.access(there, os.W_OK | os.X_OK) or not (home := Path(os.path.expanduser("~"))).is_dir():
        return base / "runs" / "default"
    return home / "fsbarrier-runs" / "default"


def absolute(path: str | Path) -> Path:
    """`path` as an absolute path, with `~` and `..` resolved; symbolic links are kept."""
    return Path(os.path.abspath(Path(path).expanduser()))


def with_absolute_paths(chosen: Iterable[ChosenValue]) -> list[ChosenValue]:
    """The `chosen` values with absolute paths. `model` is unchanged, because it may be a name."""
    result = []
    for item in chosen:
        value = item.value
        if isinstance(value, str) and value:
            if item.key == "data_path" and value.startswith(DATA_ON_HUB):
                pass
            elif item.key in ("data_path", "log_path", "init_from") or (
                item.key == "program" and value.endswith(".py")
            ):
                value = str(absolute(value))
            elif item.key in ("reward.kind", "rollout.agent", "algorithm.loss") and ":" in value:
                value = ",".join(map(_with_absolute_file, reward_kinds(value)))
        result.append(ChosenValue(item.key, value, item.source))
    return result


def _with_absolute_file(named: str) -> str:
    file, colon, name = named.rpartition(":")
    return f"{absolute(file)}:{name}" if colon else named


def check_log_path(path: Path, named: str = "--log-path") -> None:
    """Check that a directory to write to (`named` by this flag or command) exists or can be created, is writable, and has free space."""
    there = path
    while not there.exists() and there.parent != there:
        if there.is_symlink():
            raise UsageError(f"{named} {path}: {there} is a broken symbolic link")
        there = there.parent
    if not there.is_dir():
        raise UsageError(f"{named} {path}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{named} {path}: you have no write permission for {there}")
    try:
        kind, status = mount_of(there).kind, os.statvfs(there)
    except OSError as error:
        raise UsageError(f"{named} {path}: {there}: {error.strerror}") from None
    if kind in NO_FILES:
        raise UsageError(f"{named} {path}: {there} is a kernel filesystem ({kind}), which cannot store files")
    free = status.f_bavail * status.f_frsize
    if status.f_flag & os.ST_RDONLY:
        raise UsageError(f"{named} {path}: its filesystem is mounted read-only")
    if status.f_blocks and free < FREE_BYTES:
        raise UsageError(
            f"{named} {path}: its filesystem has {free / 1e6:.0f} MB free, and at least {FREE_BYTES / 1e6:.0f} MB are needed"
        )
