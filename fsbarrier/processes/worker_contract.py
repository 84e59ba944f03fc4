"""The interface between a daemon and a worker program: three JSON files in a private folder.

    spec.json      Written by the daemon before it starts `PROGRAM --spec spec.json`: the job, the resolved settings, the paths
                   of the other two files ("progress", "result") and of the run's record ("run_record"), and the host's monotonic
                   clock ("launched_at").
    progress.json  Rewritten by the program while it works, at most five times a second. The daemon includes it in every
                   heartbeat, so it must be small. Its changes also show that the program is not stalled.
    result.json    Written by the program once, at the end. The daemon reads it after exit code 0, or when a kept program reports
                   that it is done. "start_s" is the time from the launch to the start of the work.

A program that fails prints a one-line message. It exits with 2 if a setting or an input file is wrong, with NOT_PERMITTED if this node
may not use a file (another node perhaps may), with 3 if a filesystem failed, and otherwise with 1. After a 3 the daemon starts it again,
so it must be able to continue, or to begin anew.

The upper half of this module is the daemon's side. It validates size and structure of everything it reads, because the
program may be the user's own. The lower half is for our own programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsbarrier.errors import FsbarrierError, ProgramFailed, StoreError
from fsbarrier.processes import failure_reason, signals
from fsbarrier.processes.kept_program import JOBS, Jobs
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.settings.sections import Settings
from fsbarrier.store import files
from fsbarrier.store.retry import is_of_the_mount

# The exit code of a program that may not open a file; sysexits.h calls it EX_NOPERM.
NOT_PERMITTED = 77
# Every heartbeat contains the progress.
MAX_PROGRESS_BYTES = 64 * 1024
# The longest result of a program or of a row's function. Every node reads it in a decision, whose record may be four times as long.
MAX_RESULT_BYTES = 16 * 1024 * 1024
# The daemon embeds a result in a record a few levels deeper, and the JSON library has a nesting limit.
MAX_NESTING = 100
# Minimum interval between progress updates.
SHOW_S = 0.2

# --- the daemon's side ---


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The three files of one program, in a private folder on this node."""

    folder: Path

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"

    @property
    def progress(self) -> Path:
        return self.folder / "progress.json"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    def write_spec(self, spec: Payload) -> None:
        """Create the folder and write the spec. Raises OSError."""
        files.make_dirs(self.folder)
        complete = {
            **spec,
            "launched_at": time.monotonic(),
            "result": str(self.result),
            "progress": str(self.progress),
        }
        files.write_atomic(self.spec, json.dumps(complete).encode())


def read_progress(path: Path) -> JsonObject | None:
    """The latest progress of the running program; None if it is missing or unreadable."""
    try:
        return _read_object(path, MAX_PROGRESS_BYTES)
    except (OSError, ValueError):
        return None


def read_result(path: Path, program: str) -> JsonObject:
    """The result of a program that exited with 0. Raises ProgramFailed if it is missing or not a JSON object."""
    try:
        return _read_object(path, MAX_RESULT_BYTES)
    except FileNotFoundError:
        raise ProgramFailed(f"{program} ended well but left no result") from None
    except (OSError, ValueError) as error:
        raise ProgramFailed(f"{program} ended well but left a bad result: {error}") from None


def _read_object(path: Path, max_bytes: int) -> JsonObject:
    with path.open("rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes; large data belongs into a file that the result names")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    if nesting(value) > MAX_NESTING:
        raise ValueError(f"nested more than {MAX_NESTING} deep")
    return value


def nesting(value: Payload) -> int:
    """The nesting depth, computed level by level so that no input can exhaust the stack."""
    depth = 0
    level: list[Any] = [value]
    while level:
        depth += 1
        inner = [item.values() if isinstance(item, Mapping) else item for item in level]
        level = [item for group in inner for item in group if isinstance(item, Mapping | list | tuple)]
    return depth


# --- the program's side ---


class ProgressWriter:
    """Writes the progress file atomically. Does nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._shown_at = path, 0.0

    def show(self, done: int, total: int, unit: str, *, last: bool = False, **fields: object) -> None:
        """Report progress, unless the last report was a moment ago. `fields`: reward_mean, tokens_per_s, note."""
        now = time.monotonic()
        if self._path is None or (now - self._shown_at < SHOW_S and not last):
            return
        self._shown_at = now
        shown = {
            "done": done,
            "total": total,
            "unit": unit,
            "reward_mean": None,
            "tokens_per_s": None,
            "note": "",
        }
        files.write_atomic(self._path, json.dumps(shown | fields).encode())


Main = Callable[[JsonObject, Settings, ProgressWriter], Mapping[str, object] | None]


def run_worker(main: Main, stays: Callable[[], bool] = lambda: False) -> int:
    """Read the spec, run `main(spec, settings, progress)`, write its result; returns the exit code.

    The programs of this package have a typed spec and report; `Spec.program` in fsbarrier/specs.py makes their `main`. It returns None
    in a process that writes no result: only one of the processes of an update does. `stays`: called after each job; whether this process
    takes another one if its daemon keeps the program (kept_program.py).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True, help="the JSON file that says what to do")
    spec: Path | None = parser.parse_args().spec
    code, jobs = 0, None
    while spec is not None:
        code = _do(main, spec)
        # Nothing is left to clean up, and an exception while Python ends would be a traceback in the log.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if code or JOBS not in os.environ or not stays():
            break
        jobs = jobs or Jobs(Path(os.environ[JOBS]))
        spec = jobs.next()
    return code


def _say(message: str) -> None:
    """Print the last message of a program. The log may be unwritable, since it is in the shared directory too."""
    with contextlib.suppress(OSError):
        print(f"{failure_reason.MESSAGE}{message}", file=sys.stderr, flush=True)


def _do(main: Main, spec_file: Path) -> int:
    """Do one job; returns the exit code."""
    spec = json.loads(spec_file.read_text())
    started_s = time.monotonic() - spec.get("launched_at", time.monotonic())
    signal.signal(signal.SIGTERM, signals.end)
    settings = Settings.from_json(spec["settings"])
    files.set_shared_group(settings.shared_group)
    if "run_record" in spec:
        files.make_dirs_only_beside(Path(spec["run_record"]))
    # Files written by libraries must get the run's permissions too.
    os.umask(0o007 if settings.shared_group else 0o077)
    try:
        result = main(spec, settings, ProgressWriter(Path(spec["progress"])))
    except FsbarrierError as error:
        _say(str(error))
        if is_of_the_mount(error.__cause__):
            return StoreError.exit_code
        return error.exit_code if error.exit_code == 2 else 1
    except OSError as error:
        # Libraries also raise OSError without an errno for their own errors; those need a traceback.
        if error.errno is None:
            raise
        _say(f"{error.filename or 'a file'}: {error.strerror}")
        refused = isinstance(error, PermissionError) and error.filename is not None
        return StoreError.exit_code if is_of_the_mount(error) else NOT_PERMITTED if refused else 1
    if result is not None:
        timed = {**result, "start_s": round(started_s, 3)}
        files.write_atomic(Path(spec["result"]), json.dumps(timed).encode())
    return 0
