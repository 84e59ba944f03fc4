"""Copies the built-in task and its tiny model into a run, because the nodes need not have this package in the same place."""

from __future__ import annotations

import os
from pathlib import Path

from fsbarrier.data.demo_tasks import FOLDER
from fsbarrier.errors import UsageError
from fsbarrier.store import files


def make(target: Path) -> None:
    """Create `target` (the run's demo folder) atomically, with the run's permissions, unless it exists. Raises UsageError."""
    if target.is_dir():
        return
    staging = files.temporary_beside(target)
    try:
        files.make_dirs(target.parent)
        for folder, _, names in os.walk(FOLDER):
            copied = staging / Path(folder).relative_to(FOLDER)
            files.make_dirs(copied)
            for name in names:
                files.write_atomic(copied / name, (Path(folder) / name).read_bytes())
        try:
            os.rename(staging, target)
        except OSError:
            # Another start may have been faster.
            if not target.is_dir():
                raise
    except OSError as error:
        raise UsageError(f"--log-path {target.parent}: not writable: {error.strerror or error}") from None
    finally:
        files.discard(staging)
