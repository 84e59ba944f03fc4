"""`init_from`: starts a run from another run's policy, and with `init_optimizer` also from its trainer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fsbarrier.cli.start import policy_export
from fsbarrier.cli.start.policy_export import VersionToExport
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.rundir.hashed_file import FileDigest, HashedFile
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.sections import LoraSettings, Settings
from fsbarrier.store import files, owned

LAYOUT = "trainer/layout.json"


@dataclass(frozen=True, slots=True)
class TrainersState:
    """The trainer state of a policy version. `digests`: by file name in the folder `version`, which is below `root`.

    `base`: with LoRA the base model, because the state contains only the adapters.
    """

    root: Path
    version: Path
    digests: Mapping[str, FileDigest]
    base: VersionToExport | None


def find(init_from: str) -> VersionToExport:
    """The policy `RUN_DIRECTORY@VERSION`, which must be complete according to its manifest. Raises UsageError."""
    folder, version = _split(init_from)
    if version and not version.isdecimal():
        raise UsageError(
            f"init_from={init_from}: {version!r} is not a policy version; write RUN_DIRECTORY@VERSION"
        )
    try:
        record = runrecord.load(Path(folder))
        return policy_export.find(record, int(version) if version else None, "policy version")
    except (UsageError, ProgramFailed) as error:
        raise UsageError(f"init_from={init_from}: {error}") from None


def _split(init_from: str) -> tuple[str, str]:
    folder, at, version = init_from.rpartition("@")
    return (folder, version) if at else (init_from, "")


def find_state(settings: Settings, policy: VersionToExport) -> TrainersState:
    """The trainer state of `policy`, which must be complete in the shared directory. Raises UsageError."""
    prefix = f"init_optimizer=true: init_from={settings.init_from}"
    record = runrecord.load(Path(_split(str(settings.init_from))[0]))
    version = policy.model.parent
    # The initial model has no manifest.
    digests = _whole_state(version) if policy.digests else {}
    if not digests:
        raise UsageError(
            f"{prefix}: policy version {policy.version} has no trainer state in the shared directory "
            f"(checkpoint.trainer_every); {_nearest_with_state(record, policy.version)}"
        )
    if settings.lora != record.settings.lora:
        theirs, ours = record.settings.lora, settings.lora
        raise UsageError(
            f"{prefix}: its trainer state is for {_adapters(theirs)}, but this run trains {_adapters(ours)}; use the same lora.rank, "
            "lora.alpha and lora.targets as that run, or drop init_optimizer"
        )
    base = _model_of_adapters(record, prefix) if settings.lora.rank else None
    return TrainersState(record.log_path, version, digests, base)


def _whole_state(version: Path) -> Mapping[str, FileDigest]:
    """The files of a policy version's trainer state according to its manifest; {} if it is incomplete or has another format."""
    try:
        manifest = checkpoints.read_manifest(version)
    except ProgramFailed:
        # The version is incomplete or being removed.
        return {}
    state = {name: digest for name, digest in manifest.files.items() if name.startswith("trainer/")}
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


def _model_of_adapters(record: RunRecord, prefix: str) -> VersionToExport:
    """The base model of the other run's adapters: its initial model, or the base that it copied from a third run itself."""
    first = policy_export.first_model(record)
    if first is not None and record.settings.init_optimizer:
        first = replace(first, model=RunPaths(record.log_path).first_policy / "base")
    if first is None or not first.model.is_dir():
        place = "" if first is None else f" {first.model}"
        raise UsageError(f"{prefix}: the base model{place} of its adapters is missing; drop init_optimizer")
    return first


def copy(init_from: str, policy: VersionToExport, state: TrainersState | None, target: Path) -> Path:
    """Copy the policy into this run, because the other run may remove or change its files. Each copy is checked against the manifest.

    Returns the model folder of the copy. Raises UsageError.
    """
    # Left by a start that was killed before it created the run.
    owned.discard(target)
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


def _copy_state(policy: VersionToExport, state: TrainersState, target: Path) -> None:
    """Add the trainer state to `target`, which already has the model, as policy version 0. Raises OSError, ProgramFailed."""
    # Imported late because torch takes seconds to load.
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
