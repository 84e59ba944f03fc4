"""`init_from`: starts a run from another run's policy."""

from __future__ import annotations

from pathlib import Path

from fsbarrier.cli.start import policy_export
from fsbarrier.cli.start.policy_export import VersionToExport
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir import runrecord
from fsbarrier.store import owned


def find(init_from: str) -> VersionToExport:
    """The policy `RUN_DIRECTORY@VERSION`, which must be complete according to its manifest. Raises UsageError."""
    folder, at, version = init_from.rpartition("@") if "@" in init_from else (init_from, "", "")
    if at and not version.isdecimal():
        raise UsageError(
            f"init_from={init_from}: {version!r} is not a policy version; write RUN_DIRECTORY@VERSION"
        )
    try:
        record = runrecord.load(Path(folder))
        return policy_export.find(record, int(version) if at else None, "policy version")
    except (UsageError, ProgramFailed) as error:
        raise UsageError(f"init_from={init_from}: {error}") from None


def copy(init_from: str, policy: VersionToExport, target: Path) -> Path:
    """Copy the policy into this run, because the other run may remove or change its files. The copy is checked against the manifest.

    Returns the model folder of the copy. Raises UsageError.
    """
    # Left by a start that was killed before it created the run.
    owned.discard(target)
    try:
        policy_export.export(policy, target / "model")
    except ProgramFailed as error:
        raise UsageError(f"init_from={init_from}: {error}") from None
    except OSError as error:
        raise UsageError(
            f"init_from={init_from}: {error.filename or target}: {error.strerror or error}"
        ) from None
    return target / "model"
