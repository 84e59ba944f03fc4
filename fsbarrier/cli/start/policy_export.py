"""Exports a policy version of a run as a Hugging Face model folder: finds it, makes it whole, verifies and uploads it.

Also for `init_from`, which starts a run from another run's policy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsbarrier.engine import model as model_folder
from fsbarrier.errors import ProgramFailed, UsageError, first_line
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.rundir.hashed_file import FileDigest, copy_hashed
from fsbarrier.rundir.newest_version import newest_version
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.store import files, reading
from fsbarrier.training.materialise import materialise

#: the folders of a policy version with the policy, with the critic's weights, and with adapters alone
POLICY, CRITIC, ADAPTERS = "model", "critic/model", f"model/{checkpoints.ADAPTER}"


@dataclass(frozen=True, slots=True)
class VersionToExport:
    """A policy version to export. `digests`: of the files in its model folder; empty for the initial model."""

    version: int
    model: Path
    digests: Mapping[str, FileDigest] = field(default_factory=dict)
    # The run directory that contains the model; links below it are not followed. None: the model is outside a run.
    root: Path | None = None
    # The folder of the version whose policy is exported (None: it is no policy version, or only a part of one), and the first model of its
    # run, to which adapters belong.
    folder: Path | None = None
    first_model: Path | None = None


def find(
    record: RunRecord, wanted: int | None, named: str = "--policy-version", part: str = POLICY
) -> VersionToExport:
    """The requested policy version; `wanted=None`: the one the run serves now. `named`: how an error names the version. `part`: the folder
    in it.

    Raises UsageError if the run has no such version, ProgramFailed if it is incomplete.
    """
    served = newest_version(record.log_path)
    there = checkpoints.versions(record.log_path)
    folders = [folder for version, folder in there if version == wanted] if wanted is not None else [served]
    complete = [
        folder for folder in folders if folder is not None and (folder / checkpoints.MANIFEST).is_file()
    ]
    # Of several attempts at one version, prefer the one that the run serves, then the newest.
    if complete:
        folder = served if served in complete else complete[-1]
        assert folder is not None
        manifest = checkpoints.check_sizes(folder)
        listed = manifest.model_files if part == POLICY else manifest.files
        digests = {
            name.removeprefix(f"{part}/"): digest
            for name, digest in listed.items()
            if name.startswith(f"{part}/")
        }
        if part == CRITIC and not digests:
            raise UsageError(
                f"--critic: policy version {manifest.policy_version} was saved without a critic (algorithm.advantage=gae; "
                "checkpoint.trainer_every)"
            )
        if part == ADAPTERS and not digests:
            raise UsageError(
                f"--adapter: policy version {manifest.policy_version} has no adapters (lora.rank)"
            )
        if not any(name.endswith((".safetensors", ".bin")) for name in digests):
            raise _no_policy(record)
        chosen = VersionToExport(manifest.policy_version, folder / part, digests, record.log_path)
        first = Path(record.model) if record.model is not None else None
        return chosen if part != POLICY else replace(chosen, folder=folder, first_model=first)
    if part == ADAPTERS and not wanted:
        raise UsageError("--adapter: the initial policy has no adapters")
    if part == CRITIC and not wanted:
        raise UsageError("--critic: the initial policy has none yet")
    if not wanted and (initial := first_model(record)) is not None:
        return initial
    if wanted is None:
        raise _no_policy(record)
    whole = (version for version, folder in there if (folder / checkpoints.MANIFEST).is_file())
    kept = ", ".join(str(version) for version in sorted({0, *whole}))
    raise UsageError(
        f"{named} {wanted}: not on disk; available: {kept} (checkpoint.keep limits how many are kept)"
    )


def _no_policy(record: RunRecord) -> UsageError:
    return UsageError(
        f"--log-path {record.log_path}: this run has no policy to export (program {record.settings.program})"
    )


def first_model(record: RunRecord) -> VersionToExport | None:
    """The run's initial model, which has no manifest; None for a program without a model."""
    if record.model is None:
        return None
    model = Path(record.model)
    root = record.log_path if model.is_relative_to(record.log_path) else None
    return VersionToExport(0, model, root=root)


def export(chosen: VersionToExport, target: Path) -> None:
    """Create `target` atomically, after verifying all of it. Raises OSError, ProgramFailed (damaged or missing files)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = files.temporary_beside(target)
    if not chosen.digests and chosen.root is not None:
        _refuse_links(chosen.model, chosen.root)
    try:
        _copy(chosen, staging)
        if (staging / "config.json").is_file():
            # This also checks that each weight file is there, and as long as its header says. Adapters alone have no such file.
            model_folder.inspect(staging)
        files.fsync_dir(staging)
        os.rename(staging, target)
    finally:
        files.discard(staging)


def made_whole(chosen: VersionToExport, into: Path) -> Path:
    """A model folder with all weights of a version: where it lies or, if the run has only adapters or a delta of it, made in the new
    folder `into`. Raises ProgramFailed."""
    if chosen.folder is None or checkpoints.read_manifest(chosen.folder).whole:
        return chosen.model
    try:
        materialise(chosen.folder, into, chosen.first_model)
    except OSError as error:
        why = f"{error.filename or into}: {error.strerror or error}"
        raise ProgramFailed(
            f"policy version {chosen.version} cannot be made whole: {why}; `fsbarrier export DIR` makes it where there is room"
        ) from None
    return into


def _copy(chosen: VersionToExport, out: Path) -> None:
    if not chosen.digests:
        # A user's own folder may contain links, as the Hugging Face cache does.
        shutil.copytree(
            chosen.model,
            out,
            copy_function=lambda source, to: copy_hashed(Path(source), Path(to), chosen.root),
        )
    elif chosen.folder is not None:
        materialise(chosen.folder, out, chosen.first_model)
        return
    for name, digest in chosen.digests.items():
        files.make_dirs((out / name).parent)
        checkpoints.copy_listed(chosen.model / name, out / name, digest, chosen.root)


def _refuse_links(model: Path, root: Path) -> None:
    """Reject links in a model below `root` that has no manifest. Raises ProgramFailed, OSError."""
    reading.check_below(root, model)
    for path in model.rglob("*"):
        if path.is_symlink():
            raise ProgramFailed(
                f"{path} is a symbolic link, which could lead out of the run; not exporting it"
            )


def push(folder: Path, repository: str, message: str) -> str:
    """Upload a model folder with Hugging Face's client, which finds the token, and return the URL.

    Creates a private repository if necessary. Raises ProgramFailed.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise UsageError("--push: needs the package huggingface_hub, which is not installed here") from None
    try:
        hub = HfApi()
        made = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
        return str(made)
    # Its errors are also those of the HTTP library on which its version is built.
    except Exception as error:
        raise ProgramFailed(f"--push {repository}: {first_line(error)}; the folder is in {folder}") from None


# --- init_from ------------------------------------------------------------------------------------------------------------


def find_other_runs(init_from: str) -> VersionToExport:
    """The policy `RUN_DIRECTORY@VERSION`, which must be complete according to its manifest. Raises UsageError."""
    folder, at, version = init_from.rpartition("@") if "@" in init_from else (init_from, "", "")
    with _in_init_from(init_from):
        if at and not version.isdecimal():
            raise UsageError(f"{version!r} is not a policy version; write RUN_DIRECTORY@VERSION")
        return find(runrecord.load(Path(folder)), int(version) if at else None, "policy version")


def copy_other_runs(init_from: str, policy: VersionToExport, target: Path) -> Path:
    """Copy the policy into this run, because the other run may remove or change its files. The copy is checked against the manifest.

    Returns the model folder of the copy. Raises UsageError.
    """
    with _in_init_from(init_from):
        # Left by a start that was killed before it created the run.
        files.discard(target)
        export(policy, target / "model")
    return target / "model"


@contextmanager
def _in_init_from(init_from: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"init_from={init_from}: {error.filename or 'copying it'}: {error.strerror or error}"
        ) from None
    except (UsageError, ProgramFailed) as error:
        raise UsageError(f"init_from={init_from}: {error}") from None
