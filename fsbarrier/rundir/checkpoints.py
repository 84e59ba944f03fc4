"""Policy versions on disk. Each is a folder, which is complete when it has a manifest; the run points at one of them.

    checkpoints/policy-000006.g0003/model/      Hugging Face folder; without weights if the version is not whole
    checkpoints/policy-000006.g0003/delta/      what changed in the weights of an earlier version, if the version is not whole
    checkpoints/policy-000006.g0003/trainer/    resumable trainer state
    checkpoints/policy-000006.g0003/MANIFEST.json   sizes and SHA-256 of all files; written last
    model.pt -> checkpoints/policy-000001.g0001/model   the newest whole version

A version is whole, or made of a base and what it adds: adapters (`model/adapter/`) or a delta. training/materialise.py makes it whole.

A folder is never renamed, and never changed once it has a manifest. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir.hashed_file import FileDigest, copy_hashed, digest_of
from fsbarrier.rundir.names import POLICY_FOLDER, MadeBy
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files, reading
from fsbarrier.store.retry import FAILING, patiently

MANIFEST = "MANIFEST.json"
# How many files of a policy version one node reads concurrently.
READERS = 8
# The subfolder of a model folder with the adapters that are merged into its weights.
ADAPTER = "adapter"


class PolicyUnreadable(ProgramFailed):
    """The mount has failed for longer than usual. The policy version may be complete."""


@dataclass(frozen=True, slots=True)
class Base:
    """The weights to which a policy version adds its own part.

    `folder`: the whole version that a delta changes; "": the run's first model, to which adapters belong. `digest`: of that version's
    manifest, or of the first model's weights. `files`: the files of weights that base and delta make, as if they lay in the version's
    folder. With adapters there are none, since each node rounds its own merge. `renamed`: the names of adapted weights in the first model's
    files, where they differ from the trainer's.
    """

    folder: str
    digest: str
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        renamed = {"renamed": dict(self.renamed)} if self.renamed else {}
        return {"folder": self.folder, "digest": self.digest, "files": _listing(self.files), **renamed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read the entry of a manifest. Raises ValueError, LookupError, TypeError, AttributeError."""
        folder = str(value["folder"])
        if folder and POLICY_FOLDER.parse(folder) is None:
            raise ValueError(f"{folder!r} is no folder of a policy version")
        renamed = {str(name): str(other) for name, other in value.get("renamed", {}).items()}
        return cls(folder, str(value["digest"]), _listed(value["files"]), renamed)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a policy version's folder, by their relative names.

    `state_in`: the folder with the trainer state from which the run resumes if the processes that trained this version are gone; "" stands
    for this folder. None: no state was saved yet, so the run would begin again with its first model. `trained_since`: the batches in
    checkpoints/batches/ that were trained after that state, up to this version, in order. `base`: what its weights are made of; None: they
    are in this folder. A version with adapters names its base also if the merged weights are in the folder.
    """

    policy_version: int
    files: Mapping[str, FileDigest]
    state_in: str | None = ""
    trained_since: tuple[str, ...] = ()
    base: Base | None = None

    def encode(self) -> bytes:
        """The content of its file."""
        body = {"policy_version": self.policy_version, "files": _listing(self.files)}
        elsewhere = {} if self.state_in == "" else {"state_in": self.state_in}
        since = {"trained_since": list(self.trained_since)} if self.trained_since else {}
        base = {} if self.base is None else {"base": self.base.as_json()}
        return json.dumps(body | elsewhere | since | base, indent=1).encode()

    @property
    def whole(self) -> bool:
        """Whether its folder has all weights, so that any program can load `model/`."""
        return self.base is None or any(is_weights(name) for name in self.files)

    @property
    def model_files(self) -> dict[str, FileDigest]:
        """The files of `model/` that the manifest lists: those in this folder, and those that are made of the base."""
        made = {} if self.base is None else self.base.files
        return {name: file for name, file in {**self.files, **made}.items() if name.startswith("model/")}

    @property
    def digest(self) -> str:
        """A digest of the content of all files, which identifies this policy."""
        return hashlib.sha256(self.encode()).hexdigest()


def moved_bytes(manifest: Manifest) -> dict[str, int]:
    """The bytes of a version in the run directory, by kind."""
    kinds = {"weights": 0, "delta": 0, "adapters": 0, "trainer_state": 0, "other": 0}
    for name, file in manifest.files.items():
        top = name.split("/")
        kind = "weights" if is_weights(name) else "adapters" if top[:2] == ["model", ADAPTER] else "other"
        kind = {"delta": "delta", "trainer": "trainer_state", "critic": "trainer_state"}.get(top[0], kind)
        kinds[kind] += file.size
    return {f"{kind}_bytes": size for kind, size in kinds.items()}


def is_weights(name: str) -> bool:
    """Whether a file of a version, by its relative name, has weights of the model (adapters are in a folder of their own)."""
    return name.startswith("model/") and name.count("/") == 1 and name.endswith((".safetensors", ".bin"))


def _listing(listed: Mapping[str, FileDigest]) -> dict[str, object]:
    return {name: {"bytes": file.size, "sha256": file.sha256} for name, file in listed.items()}


def _listed(value: Mapping[str, Any]) -> dict[str, FileDigest]:
    return {
        _inner_name(name): FileDigest(int(item["bytes"]), str(item["sha256"])) for name, item in value.items()
    }


def identity(folder: str, digest: str) -> str:
    """A short identity of a policy, unique even among policies of one version."""
    return f"{folder}:{digest[:16]}"


def check_identity(folder: Path, policy: str) -> None:
    """Check that a folder holds the published policy (`identity`). Raises ProgramFailed.

    Comparing the files with the manifest is not enough, since a folder that was replaced as a whole is consistent. If `policy` has no
    digest, nothing is compared: the run's first model has none, and a program that publishes in its own way decides without one.
    """
    if not policy.partition(":")[2]:
        return
    here = identity(folder.name, read_manifest(folder).digest)
    if here != policy:
        raise ProgramFailed(
            f"{folder} holds another policy than was published ({here} in the place of {policy})"
        )


def write_manifest(folder: Path, policy_version: int, base: Base | None = None) -> Manifest:
    """Complete a `folder` whose files were not hashed: flush, read and list every file in it. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    digests = {path.relative_to(folder).as_posix(): digest_of(path) for path in paths}
    return commit(folder, Manifest(policy_version, digests, base=base))


def commit(folder: Path, manifest: Manifest) -> Manifest:
    """Complete a `folder` by writing its manifest. All listed files must have been flushed. Raises OSError."""
    for directory in (*(path for path in folder.rglob("*") if path.is_dir()), folder, folder.parent):
        files.fsync_dir(directory)
    files.write_atomic(folder / MANIFEST, manifest.encode(), durable=True)
    return manifest


def is_complete(folder: Path) -> bool:
    """Whether a policy version that is being made is complete. It lists folders, since a client may cache that a name is absent.

    Raises OSError.
    """
    wanted = folder.parent, folder, folder / MANIFEST
    return all(path.name in os.listdir(path.parent) for path in wanted)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises ProgramFailed if it is missing or unreadable."""
    try:
        body = json.loads(patiently(lambda: _read_below(folder, MANIFEST)))
        state_in = body.get("state_in", "")
        if state_in and POLICY_FOLDER.parse(state_in) is None:
            raise ValueError(f"{state_in!r} is no folder of a policy version")
        since = tuple(map(_inner_name, body.get("trained_since", ())))
        base = Base.from_json(body["base"]) if "base" in body else None
        return Manifest(int(body["policy_version"]), _listed(body["files"]), state_in, since, base)
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
        raise _unreadable(error, f"{folder / MANIFEST} cannot be read: {error}") from None


def _unreadable(error: Exception, reason: str) -> ProgramFailed:
    failing = isinstance(error, OSError) and error.errno in FAILING
    return PolicyUnreadable(reason) if failing else ProgramFailed(reason)


def newest_state(folder: Path) -> tuple[str | None, tuple[str, ...]]:
    """The newest version up to this one that has a trainer state (None: no version has), and the batches that were trained since.

    Raises ProgramFailed.
    """
    manifest = read_manifest(folder)
    return (folder.name, ()) if manifest.state_in == "" else (manifest.state_in, manifest.trained_since)


def _read_below(folder: Path, name: str) -> bytes:
    path = folder / name
    with os.fdopen(reading.open_below(folder.parent, path), "rb") as stream:
        return reading.read_all(stream, reading.JSON_BYTES, path)


def _inner_name(name: str) -> str:
    """Check that a name in a manifest leads to a file in that folder, and return it. Raises ValueError."""
    if os.path.isabs(name) or os.path.normpath(name) != name or name.split("/")[0] in (".", ".."):
        raise ValueError(f"{name!r} is no name inside the folder")
    return name


def check_sizes(folder: Path) -> Manifest:
    """Check that every file of a policy version is a plain file of the right size, without reading it, and that its base is there.

    Raises ProgramFailed naming the first bad one.
    """
    manifest = read_manifest(folder)
    if not any(name.startswith("model/") for name in manifest.files):
        raise ProgramFailed(f"{folder} has no model/ in its manifest")
    for name, digest in manifest.files.items():
        path = folder / name
        with _opened(folder, name) as fd:
            size = os.fstat(fd).st_size
        if size != digest.size:
            raise ProgramFailed(f"{path} has {size} bytes; {MANIFEST} says {digest.size}")
    if manifest.base is not None and manifest.base.folder:
        check_anchor(folder, manifest.base)
    return manifest


def check_anchor(folder: Path, base: Base) -> Manifest:
    """Check that the version that a delta in `folder` changes is the one that it was made for; returns its manifest. Raises
    ProgramFailed."""
    anchor = folder.parent / base.folder
    manifest = read_manifest(anchor)
    if manifest.digest != base.digest:
        raise ProgramFailed(
            f"{anchor} is not the version to which the delta in {folder.name} belongs: its {MANIFEST} was changed"
        )
    return manifest


def verify(folder: Path, part: str = "", between_reads: Callable[[], None] = lambda: None) -> Manifest:
    """Read a policy version, or only the folder `part` of it, and compare it with the manifest.

    Raises ProgramFailed naming a bad file. The reading threads call `between_reads` all the time, which may raise to cancel.
    """
    manifest = check_sizes(folder)
    compare(
        folder, {name: file for name, file in manifest.files.items() if name.startswith(part)}, between_reads
    )
    return manifest


def compare(folder: Path, expected: Mapping[str, FileDigest], between_reads: Callable[[], None]) -> None:
    """Read the files below `folder` concurrently. Raises ProgramFailed naming one that differs from the expected digest."""

    def check(name: str) -> None:
        with _opened(folder, name) as fd:
            sha256 = files.sha256_open(fd, between_reads)
        if sha256 != expected[name].sha256:
            raise differs(folder / name)

    for_all(check, expected)


def for_all(check: Callable[[str], None], names: Iterable[str]) -> None:
    """Check files concurrently. Raises the first exception."""
    with ThreadPoolExecutor(READERS) as threads:
        for _ in threads.map(check, names):
            pass


def differs(path: Path) -> ProgramFailed:
    return ProgramFailed(f"{path} differs from what {MANIFEST} says: it was changed or damaged")


def copy_listed(source: Path, target: Path, digest: FileDigest | None, root: Path | None) -> FileDigest:
    """Copy a file and compare it with the `digest` in its manifest. If `digest` is None, no manifest lists it and nothing is compared.

    `root`: no link is followed below it. Raises OSError, ProgramFailed.
    """
    copied = copy_hashed(source, target, root)
    if digest is not None and copied != digest:
        raise differs(source)
    return copied


def read_listed(folder: Path, name: str) -> bytes | None:
    """The content of a small file in a policy version's manifest; None if the manifest does not list it. Raises ProgramFailed."""
    digest, path = read_manifest(folder).files.get(name), folder / name
    if digest is None:
        return None
    try:
        data = patiently(lambda: _read_below(folder, name))
    except OSError as error:
        raise _unreadable(error, f"{path}, listed in {MANIFEST}, cannot be read: {error}") from None
    if hashlib.sha256(data).hexdigest() != digest.sha256:
        raise differs(path)
    return data


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[int]:
    """Open a file of a policy version, without following links. Raises ProgramFailed."""
    path = folder / name
    try:
        fd = patiently(lambda: reading.open_below(folder.parent, path))
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(error, f"{path}, listed in {MANIFEST}, cannot be read: {error}") from None


def publish_link(log_path: Path, folder: Path, last_look: Callable[[], None] = lambda: None) -> Path:
    """Point <log-path>/model.pt at `folder`/model atomically, by a symbolic link.

    `last_look` is called right before that, and may raise to refuse it. Raises ProgramFailed if model.pt is already at a newer policy
    version, OSError.
    """
    served = RunPaths(log_path).served_model
    temporary = files.temporary_beside(served)
    try:
        _link_to_model(folder, temporary)
        last_look()
        _refuse_to_go_back(log_path, folder)
        files.rename(temporary, served)
    except BaseException:
        # If the removal fails, the temporary link stays. Its name begins with a dot, so readers skip it.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    files.fsync_dir(log_path)
    return served


def _link_to_model(folder: Path, name: Path) -> None:
    try:
        patiently(lambda: os.symlink(os.path.relpath(folder / "model", name.parent), name))
    except OSError:
        # If the link exists despite the error, the call has succeeded, since nobody else makes such a name.
        if not name.is_symlink():
            raise


def _refuse_to_go_back(log_path: Path, folder: Path) -> None:
    served, ours = served_policy(log_path), POLICY_FOLDER.parse(folder.name)
    if served is not None and ours is not None and served > ours:
        newer = POLICY_FOLDER.build(served.number, served.generation)
        raise ProgramFailed(
            f"{RunPaths(log_path).served_model} names {newer} already, which is newer than {folder.name}; it never goes back"
        )


def served_policy(log_path: Path) -> MadeBy | None:
    """The policy version that model.pt names; None if it is missing or names no run's policy version. Raises OSError."""
    served = RunPaths(log_path).served_model
    # A fresh listing makes an NFS client revalidate the name.
    if served.name not in os.listdir(log_path):
        return None
    try:
        return POLICY_FOLDER.parse(Path(os.readlink(served)).parent.name)
    except OSError as error:
        # EINVAL: model.pt is no link, so a person has replaced it.
        if error.errno not in (errno.ENOENT, errno.EINVAL):
            raise
        return None


def versions(log_path: Path) -> list[tuple[int, Path]]:
    """All policy versions on disk, complete or not, oldest first."""
    root = RunPaths(log_path).checkpoints
    folders = list(root.iterdir()) if root.is_dir() and not root.is_symlink() else []
    return sorted((made.number, folder) for folder in folders if (made := POLICY_FOLDER.parse(folder.name)))
