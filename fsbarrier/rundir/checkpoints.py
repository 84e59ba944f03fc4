"""Policy versions on disk: a folder each, complete when its manifest is there; the run points at one of them.

    checkpoints/policy-000006.g0003/model/      Hugging Face folder, what vLLM loads
    checkpoints/policy-000006.g0003/trainer/    resumable trainer state
    checkpoints/policy-000006.g0003/MANIFEST.json   sizes and SHA-256 of all files; written last
    model.pt -> checkpoints/policy-000006.g0003/model

Folders are never renamed and never changed once their manifest is there. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsbarrier import files
from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.rundir.paths import RunPaths

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class Manifest:
    """What a policy version's folder holds. `files`: relative name -> (bytes, SHA-256)."""

    policy_version: int
    files: dict[str, tuple[int, str]]


def write_manifest(folder: Path, policy_version: int) -> Manifest:
    """Declare `folder` complete: flush and list every file in it. The last step of whoever makes one. Raises OSError."""
    entries = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        entries[path.relative_to(folder).as_posix()] = (path.stat().st_size, files.sha256_file(path))
    for directory in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        files.fsync_dir(directory)
    listed = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in entries.items()}
    body = {"policy_version": policy_version, "files": listed}
    files.write_atomic(folder / MANIFEST, json.dumps(body, indent=1).encode(), durable=True)
    return Manifest(policy_version, entries)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises ProgramFailed if there is none or it cannot be read: the folder is not complete."""
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
        listed = {
            str(name): (int(item["bytes"]), str(item["sha256"])) for name, item in body["files"].items()
        }
        return Manifest(int(body["policy_version"]), listed)
    except FileNotFoundError:
        raise ProgramFailed(f"{folder} is no complete policy version: it has no {MANIFEST}") from None
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ProgramFailed(f"{folder / MANIFEST} cannot be read: {error}") from None


def verify(folder: Path, between_reads: Callable[[], None] = lambda: None) -> Manifest:
    """Check every file of a policy version against its manifest. Raises ProgramFailed naming the first bad one.

    A real model takes minutes. `between_reads` is called all the while, and may end the check by raising.
    """
    manifest = read_manifest(folder)
    if not any(name.startswith("model/") for name in manifest.files):
        raise ProgramFailed(f"{folder} has no model/ in its manifest")
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        try:
            if path.stat().st_size != size:
                raise ProgramFailed(f"{path} has {path.stat().st_size} bytes; {MANIFEST} says {size}")
            if files.sha256_file(path, between_reads) != digest:
                raise ProgramFailed(f"{path} differs from what {MANIFEST} says: it was changed or damaged")
        except OSError as error:
            raise ProgramFailed(f"{path}, listed in {MANIFEST}, cannot be read: {error}") from None
    return manifest


def publish_link(log_path: Path, folder: Path) -> Path:
    """Make <log-path>/model.pt name `folder`/model, in one step; a copy where the filesystem has no symbolic links. Raises OSError."""
    target, served = folder / "model", RunPaths(log_path).served_model
    temporary = files.temporary_beside(served)
    try:
        os.symlink(os.path.relpath(target, log_path), temporary)
    except OSError:
        shutil.copytree(target, temporary)
    if served.is_dir() and not served.is_symlink():
        # A copy from an earlier version is in the way, and no filesystem replaces a folder in one step.
        old = served.with_name(f".{served.name}.{secrets.token_hex(6)}.old")
        os.rename(served, old)
        os.rename(temporary, served)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(temporary, served)
    return served


def retain(log_path: Path, keep: int, current: Path) -> list[Path]:
    """Remove all but the newest `keep` policy versions (0: keep all); never `current` or the one before it.

    The version before is kept because a node may still be loading it. Gives what was removed.
    """
    if keep <= 0:
        return []
    folders = versions(log_path)
    newest = [version for version, _ in folders if version <= _version(current)]
    spared = set(sorted(set(newest), reverse=True)[: max(keep, 2)])
    removed = []
    for version, folder in folders:
        if version not in spared and version < _version(current) and folder != current:
            with contextlib.suppress(OSError):
                # Remove the manifest first, so that a half-removed folder does not look complete.
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def versions(log_path: Path) -> list[tuple[int, Path]]:
    """All policy versions on disk, complete or not, oldest first."""
    root = RunPaths(log_path).checkpoints
    folders = list(root.iterdir()) if root.is_dir() else []
    return sorted((made.number, folder) for folder in folders if (made := POLICY_FOLDER.parse(folder.name)))


def _version(folder: Path) -> int:
    made = POLICY_FOLDER.parse(folder.name)
    return made.number if made is not None else 0
