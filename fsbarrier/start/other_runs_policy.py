"""`init_from`: a policy of another run as the first model of a new one, and with `init_optimizer` the state of its trainer too."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fsbarrier import files
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.rundir.hashed_file import FileDigest, HashedFile
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.sections import LoraSettings, Settings
from fsbarrier.start import policy_export
from fsbarrier.start.policy_export import Exported

LAYOUT = "trainer/layout.json"


@dataclass(frozen=True, slots=True)
class TrainersState:
    """The state of a policy version. `digests`: of its files, by their names in the folder `version`, which is below `root`.

    `base`: with LoRA the model that the adapters were put into; the state holds nothing but adapters.
    """

    root: Path
    version: Path
    digests: Mapping[str, FileDigest]
    base: Exported | None


def find(init_from: str) -> Exported:
    """The policy that `RUN_DIRECTORY@VERSION` names; it lies there whole, by its manifest. Raises UsageError."""
    folder, version = _split(init_from)
    if version and not version.isdecimal():
        raise UsageError(
            f"init_from={init_from}: {version!r} is no policy version; write RUN_DIRECTORY@VERSION"
        )
    try:
        return policy_export.find(runrecord.load(Path(folder)), int(version) if version else None)
    except (UsageError, ProgramFailed) as error:
        raise UsageError(f"init_from={init_from}: {error}") from None


def _split(init_from: str) -> tuple[str, str]:
    folder, at, version = init_from.rpartition("@")
    return (folder, version) if at else (init_from, "")


def find_state(settings: Settings, policy: Exported) -> TrainersState:
    """The state of the trainer that belongs to `policy`, whole on the shared directory. Raises UsageError."""
    said = f"init_optimizer=true: init_from={settings.init_from}"
    record = runrecord.load(Path(_split(str(settings.init_from))[0]))
    version = policy.model.parent
    # The run's first model has no manifest.
    digests = _whole_state(version) if policy.digests else {}
    if not digests:
        raise UsageError(
            f"{said}: policy version {policy.version} has no whole trainer state in the shared directory "
            f"(checkpoint.trainer_every); {_nearest_with_state(record, policy.version)}"
        )
    if settings.lora != record.settings.lora:
        theirs, ours = record.settings.lora, settings.lora
        raise UsageError(
            f"{said}: its trainer state is of {_adapters(theirs)}, and this run trains {_adapters(ours)}; give both runs the same "
            "lora.rank, lora.alpha and lora.targets, or leave init_optimizer out"
        )
    base = _model_of_adapters(record, said) if settings.lora.rank else None
    return TrainersState(record.log_path, version, digests, base)


def _whole_state(version: Path) -> Mapping[str, FileDigest]:
    """The files of a policy version's trainer state, as its manifest has them; none where not all are there, or it is no state of ours."""
    try:
        if checkpoints.newest_state(version) != version.name:
            return {}
        manifest = checkpoints.read_manifest(version)
    except ProgramFailed:
        # The version is not complete, or is being removed.
        return {}
    listed = {**manifest.files, **manifest.following}
    state = {name: digest for name, digest in listed.items() if name.startswith("trainer/")}
    return state if LAYOUT in state else {}


def _nearest_with_state(record: RunRecord, wanted: int) -> str:
    whole = [number for number, folder in checkpoints.versions(record.log_path) if _whole_state(folder)]
    if not whole:
        return "no version of that run has one"
    return f"the nearest version that has one is {min(whole, key=lambda number: abs(number - wanted))}"


def _adapters(lora: LoraSettings) -> str:
    if not lora.rank:
        return "the whole policy"
    targets = ",".join(lora.targets) or "all layers"
    return f"adapters of rank {lora.rank} and alpha {lora.alpha:g} for {targets}"


def _model_of_adapters(record: RunRecord, said: str) -> Exported:
    """What the other run put its adapters into: its first model, or, if it came from a third run with its state, what they did."""
    first = policy_export.first_model(record)
    if first is not None and record.settings.init_optimizer:
        first = replace(first, model=RunPaths(record.log_path).first_policy / "base")
    if first is None or not first.model.is_dir():
        place = "" if first is None else f" {first.model}"
        raise UsageError(f"{said}: the model{place} that its adapters were put into is gone")
    return first


def copy(init_from: str, policy: Exported, state: TrainersState | None, target: Path) -> Path:
    """The run's own copy, each file compared with the other run's manifest: that run may remove its own, or change.

    Gives the model's folder in it. Raises UsageError.
    """
    # A start that was killed left it, before there was a run.
    shutil.rmtree(target, ignore_errors=True)
    model = target / "model"
    try:
        policy_export.export(policy, model, None)
        if state is not None:
            if state.base is not None:
                policy_export.export(state.base, target / "base", None)
            _copy_state(policy, state, target)
    except ProgramFailed as error:
        raise UsageError(f"init_from={init_from}: {error}") from None
    except OSError as error:
        raise UsageError(
            f"init_from={init_from}: {error.filename or target}: {error.strerror or error}"
        ) from None
    return model


def _copy_state(policy: Exported, state: TrainersState, target: Path) -> None:
    """Make `target`, which has the model, a policy version 0 with its trainer state. Raises OSError, ProgramFailed."""
    # torch takes seconds to load, and only this needs it.
    from fsbarrier.training.trainer_state import StateLayout

    digests = {f"model/{name}": digest for name, digest in policy.digests.items()}
    files.make_dirs(target / "trainer")
    for name, digest in state.digests.items():
        if name != LAYOUT:
            checkpoints.copy_listed(state.version / name, target / name, digest, state.root)
            digests[name] = digest
    # The other run's version N becomes this run's version 0.
    layout = replace(StateLayout.read(state.version / "trainer"), policy_version=0)
    with HashedFile(target / LAYOUT) as file:
        file.write(layout.encoded())
    checkpoints.commit(target, checkpoints.Manifest(0, {**digests, LAYOUT: file.digest}))
