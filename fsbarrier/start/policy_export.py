"""A policy version of a run as a Hugging Face model folder of its own: found, copied or converted, checked, sent to a hub."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier import files, reading
from fsbarrier.engine import model as model_folder
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.hashed_file import FileDigest, copy_hashed
from fsbarrier.rundir.runrecord import RunRecord

# A file of weights whose name says how many there are.
NUMBERED = re.compile(r".*-\d{5}-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class Exported:
    """A policy version to be exported. `digests`: of what is in its model folder; none for the run's first model."""

    version: int
    model: Path
    trainer: Path | None = None
    digests: Mapping[str, FileDigest] = field(default_factory=dict)
    # The directory of the run in which the model lies, below which no link is followed; None: it lies in none.
    root: Path | None = None


def find(record: RunRecord, wanted: int | None) -> Exported:
    """The policy version that is asked for; None: what the run serves now.

    Raises UsageError where the run has no such version, ProgramFailed for one that is not whole.
    """
    made = checkpoints.served_policy(record.log_path)
    served = record.paths.checkpoint(made.number, made.generation) if made else None
    there = checkpoints.versions(record.log_path)
    folders = [folder for version, folder in there if version == wanted] if wanted is not None else [served]
    complete = [
        folder for folder in folders if folder is not None and (folder / checkpoints.MANIFEST).is_file()
    ]
    # Of several attempts at one version the one that the run serves, else the newest.
    if complete:
        folder = served if served in complete else complete[-1]
        assert folder is not None
        manifest = checkpoints.check_sizes(folder)
        digests = {
            name.removeprefix("model/"): digest
            for name, digest in manifest.files.items()
            if name.startswith("model/")
        }
        # What the nodes are still to bring of a state is in the manifest, and not here.
        listed = any(name.startswith("trainer/") for name in manifest.files)
        state = listed and checkpoints.newest_state(folder) == folder.name
        trainer = folder / "trainer" if state else None
        return Exported(manifest.policy_version, folder / "model", trainer, digests, record.log_path)
    if not wanted and (first := first_model(record)) is not None:
        return first
    if wanted is None:
        raise UsageError(
            f"--log-path {record.log_path}: this run has no policy (program {record.settings.program})"
        )
    whole = (version for version, folder in there if (folder / checkpoints.MANIFEST).is_file())
    kept = ", ".join(str(version) for version in sorted({0, *whole}))
    raise UsageError(
        f"--policy-version {wanted}: not on disk; there are {kept} (checkpoint.keep says how many stay)"
    )


def first_model(record: RunRecord) -> Exported | None:
    """What the run began with, which no manifest lists; None: a program without a model."""
    if record.model is None:
        return None
    model = Path(record.model)
    root = record.log_path if model.is_relative_to(record.log_path) else None
    return Exported(0, model, root=root)


def export(chosen: Exported, target: Path, dtype: str | None) -> None:
    """Make `target`, which appears in one step, when all of it is there and right. `dtype`: bf16 or fp32; None: as it is served.

    Raises OSError, ProgramFailed (something is damaged or missing), UsageError (that precision cannot be made).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = files.temporary_beside(target)
    if not chosen.digests and chosen.root is not None:
        _refuse_links(chosen.model, chosen.root)
    try:
        if dtype is None:
            _copy(chosen, staging)
        else:
            # torch takes seconds to load, and a plain copy does without.
            from fsbarrier.training.convert_model import DTYPES, convert, pinned

            with ExitStack() as stack:
                model, trainer = chosen.model, chosen.trainer
                if chosen.root is not None:
                    here = stack.enter_context(pinned(model.parent, _needed(chosen), chosen.root))
                    model, trainer = here / model.name, here / "trainer" if trainer else None
                # A model that no run has trained has no more exact weights than those that it has.
                convert(model, trainer, staging, DTYPES[dtype], trained=bool(chosen.digests))
        check_whole(staging)
        files.fsync_dir(staging)
        os.rename(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy(chosen: Exported, out: Path) -> None:
    if not chosen.digests:
        _copy_first_model(chosen, out)
    for name, digest in chosen.digests.items():
        files.make_dirs((out / name).parent)
        checkpoints.copy_listed(chosen.model / name, out / name, digest, chosen.root)


def _needed(chosen: Exported) -> dict[str, FileDigest | None]:
    """What of a policy in the run directory its conversion reads, by the name beside the model's folder. Raises ProgramFailed."""
    if not chosen.digests:
        found = (path for path in chosen.model.rglob("*") if path.is_file())
        return dict.fromkeys(path.relative_to(chosen.model.parent).as_posix() for path in found)
    manifest = checkpoints.read_manifest(chosen.model.parent)
    parts = ("model/", "trainer/") if chosen.trainer else ("model/",)
    listed = {**manifest.files, **manifest.following}
    return {name: digest for name, digest in listed.items() if name.startswith(parts)}


def _refuse_links(model: Path, root: Path) -> None:
    """For a model below `root` that no manifest lists. Raises ProgramFailed, OSError."""
    reading.check_below(root, model)
    for path in model.rglob("*"):
        if path.is_symlink():
            raise ProgramFailed(f"{path} is a link, which leads out of the run; it is not exported")


def _copy_first_model(chosen: Exported, out: Path) -> None:
    """The run's first model, which no manifest lists. A folder of the user's own may hold links, as the hub's cache does."""

    def copy(source: str, target: str) -> None:
        copy_hashed(Path(source), Path(target), chosen.root)

    shutil.copytree(chosen.model, out, copy_function=copy)


def check_whole(folder: Path) -> None:
    """A model folder has all the weights that its own files speak of. Raises ProgramFailed naming what is missing."""
    shapes = model_folder.inspect(folder).shapes
    index = folder / "model.safetensors.index.json"
    if shapes is None:
        return
    if index.is_file():
        listed = reading.json_object(index, ProgramFailed).get("weight_map")
        lacking = sorted(set(listed if isinstance(listed, Mapping) else ()) - set(shapes))
        if lacking:
            raise ProgramFailed(f"{folder}: no file has the weight {lacking[0]}, which {index.name} lists")
    numbered = [match for path in folder.iterdir() if (match := NUMBERED.fullmatch(path.name))]
    if numbered and len(numbered) != int(numbered[0].group(1)):
        raise ProgramFailed(
            f"{folder}: {len(numbered)} files of weights, where {numbered[0].group()} says how many there are"
        )


def push(folder: Path, repository: str, message: str) -> str:
    """Send a model folder to a hub with Hugging Face's own client, which finds the token; gives the address.

    The repository is made, private, where there is none. Raises ProgramFailed.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise UsageError("--push: needs the package huggingface_hub, which is not installed here") from None
    from httpx import HTTPError

    try:
        hub = HfApi()
        made = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
        return str(made)
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProgramFailed(f"--push {repository}: {first}; the folder is in {folder}") from None
