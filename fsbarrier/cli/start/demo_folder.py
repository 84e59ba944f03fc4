"""Copies the built-in task and its tiny model into a run. `fsbarrier.workers.demo_model` creates them once, in a cache."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from fsbarrier.data import demo_tasks
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.processes.supervisor import own_program, with_this_package
from fsbarrier.store import files, owned
from fsbarrier.store.own_folder import own_folder
from fsbarrier.store.private_folder import private_folder


def make(target: Path, cache: Path, say: Callable[[str], None]) -> None:
    """Create `target` (the run's demo folder) unless it exists. `cache`: the folder with the copy shared by all runs.

    Raises ProgramFailed if the model cannot be created, UsageError if a folder is not writable.
    """
    if demo_tasks.is_ready(target):
        return
    source = demo_tasks.folder(cache)
    if not demo_tasks.is_ready(source):
        say("creating the built-in task and its tiny model (only once; takes about a minute)")
        _make(source)
    try:
        _copy(source, target)
    except OSError as error:
        raise UsageError(f"--log-path {target.parent}: not writable: {error.strerror or error}") from None


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder.parent}: cannot create this folder: {error.strerror or error}") from None
    # Run in the foreground, so that the user sees the progress bar and Ctrl-C reaches the program.
    command = own_program("fsbarrier.workers.demo_model", "--out", str(folder))
    # torch loads compiled code from a temporary folder with a predictable name, so give it a private one.
    with own_folder(private_folder().path, "demo") as temporary:
        env = {**with_this_package(os.environ), "TMPDIR": str(temporary)}
        code = subprocess.run(command, env=env).returncode
    if code < 0:
        raise (
            KeyboardInterrupt
            if code == -2
            else ProgramFailed(f"creating the built-in task: killed by signal {-code}; start again")
        )
    if code != 0 or not demo_tasks.is_ready(folder):
        raise ProgramFailed(
            f"creating the built-in task in {folder} failed (exit code {code}); see its output above"
        )


def _copy(source: Path, target: Path) -> None:
    """Create `target` atomically, with the run's permissions. If another process was first, its copy is used."""
    files.make_dirs(target.parent)
    staging = files.temporary_beside(target)
    try:
        for folder, _, names in os.walk(source):
            here = staging / Path(folder).relative_to(source)
            files.make_dirs(here)
            for name in names:
                files.write_atomic(here / name, (Path(folder) / name).read_bytes())
        try:
            os.rename(staging, target)
        except OSError:
            if not demo_tasks.is_ready(target):
                raise
    finally:
        owned.discard(staging)
