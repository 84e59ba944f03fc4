"""Puts the built-in task and its tiny model into a run: made by `fsbarrier.workers.demo_model` once, then copied from a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from fsbarrier import files
from fsbarrier.data import demo_tasks
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.host.own_folder import own_folder
from fsbarrier.host.private_folder import private_folder
from fsbarrier.supervision.supervisor import own_program, with_this_package


def make(target: Path, cache: Path, say: Callable[[str], None]) -> None:
    """Fill `target` (the run's demo folder) unless it is there. `cache`: where the one for all runs is kept.

    Raises ProgramFailed where the model cannot be made, UsageError where nothing can be written.
    """
    if demo_tasks.is_ready(target):
        return
    source = demo_tasks.folder(cache)
    if not demo_tasks.is_ready(source):
        say("making the built-in task and its tiny model (once; about a minute)")
        _make(source)
    try:
        _copy(source, target)
    except OSError as error:
        raise UsageError(
            f"--log-path {target.parent}: cannot be written: {error.strerror or error}"
        ) from None


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder.parent}: cannot be made: {error.strerror or error}") from None
    # Run it in the foreground, so that the user sees its progress bar and Ctrl-C reaches it.
    command = own_program("fsbarrier.workers.demo_model", "--out", str(folder))
    # torch takes compiled code from a temporary folder whose name anybody can foresee.
    with own_folder(private_folder().path, "demo") as temporary:
        env = {**with_this_package(os.environ), "TMPDIR": str(temporary)}
        code = subprocess.run(command, env=env).returncode
    if code < 0:
        raise (
            KeyboardInterrupt
            if code == -2
            else ProgramFailed(f"making the built-in task: ended by signal {-code}")
        )
    if code != 0 or not demo_tasks.is_ready(folder):
        raise ProgramFailed(
            f"making the built-in task in {folder} failed (exit code {code}); its output is above"
        )


def _copy(source: Path, target: Path) -> None:
    """`target` appears in one step, with the run's permissions; a process that comes second finds it there."""
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
        shutil.rmtree(staging, ignore_errors=True)
