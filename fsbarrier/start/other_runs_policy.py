"""`init_from`: a policy of another run as the first model of a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir import runrecord
from fsbarrier.start import policy_export
from fsbarrier.start.policy_export import Exported


def find(init_from: str) -> Exported:
    """The policy that `RUN_DIRECTORY@VERSION` names; it lies there whole, by its manifest. Raises UsageError."""
    folder, at, version = init_from.rpartition("@")
    if not at:
        folder, version = init_from, ""
    if version and not version.isdecimal():
        raise UsageError(
            f"init_from={init_from}: {version!r} is no policy version; write RUN_DIRECTORY@VERSION"
        )
    try:
        return policy_export.find(runrecord.load(Path(folder)), int(version) if version else None)
    except (UsageError, ProgramFailed) as error:
        raise UsageError(f"init_from={init_from}: {error}") from None


def copy(init_from: str, policy: Exported, target: Path) -> Path:
    """The run's own copy, each file compared with the other run's manifest: that run may remove its own, or change. Raises UsageError."""
    # A start that was killed left it, before there was a run.
    shutil.rmtree(target, ignore_errors=True)
    try:
        policy_export.export(policy, target, None)
    except ProgramFailed as error:
        raise UsageError(f"init_from={init_from}: {error}") from None
    except OSError as error:
        raise UsageError(
            f"init_from={init_from}: {error.filename or target}: {error.strerror or error}"
        ) from None
    return target
