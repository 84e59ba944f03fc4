"""The contract between a daemon and a worker program: three JSON files in a folder that only they use.

    spec.json      The daemon writes it before it starts `PROGRAM --spec spec.json`: what to do, the resolved settings,
                   and in "progress" and "result" the paths of the other two files; in "launched_at" the host's monotonic clock.
    progress.json  The program rewrites it while it works, at most five times a second. The daemon puts it into every
                   heartbeat, so it must be small. That the file changes is also the program's sign of life.
    result.json    The program writes it once, when all its work is done. The daemon reads it when the exit code is 0, or a program
                   that is kept says that it is done. Its "start_s" is the time from the launch to the beginning of its work.

A program that fails prints one line for people and exits with 1, or with 2 where a setting or an input file is wrong.

The upper half of this module is the daemon's side. It trusts neither size nor shape of what it reads, for the program
may be the user's own. The lower half is what our own programs call.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsbarrier import files
from fsbarrier.errors import FsbarrierError, ProgramFailed
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.settings.sections import Settings
from fsbarrier.supervision import signals
from fsbarrier.supervision.kept_program import JOBS, Jobs

# Every heartbeat carries the progress.
MAX_PROGRESS_BYTES = 64 * 1024
# Every node reads the result as part of a decision. A record may be four times as large.
MAX_RESULT_BYTES = 16 * 1024 * 1024
# The daemon writes the result again, some levels further down in a record, and the JSON library has a limit of its own.
MAX_NESTING = 100
# The program shows its progress at most this often.
SHOW_S = 0.2

Spec = TypeVar("Spec")

# --- the daemon's side ---


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The three files of one program, in a folder on this node that nobody else uses."""

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
        """Make the folder and leave the spec in it. Raises OSError."""
        files.make_dirs(self.folder)
        complete = {
            **spec,
            "launched_at": time.monotonic(),
            "result": str(self.result),
            "progress": str(self.progress),
        }
        files.write_atomic(self.spec, json.dumps(complete).encode())


def read_progress(path: Path) -> JsonObject | None:
    """The progress that the running program last wrote; None if there is none that can be read."""
    try:
        return _read_object(path, MAX_PROGRESS_BYTES)
    except (OSError, ValueError):
        return None


def read_result(path: Path, program: str) -> JsonObject:
    """The result of a program that exited with 0. Raises ProgramFailed where there is none, or it is no JSON object."""
    try:
        result = _read_object(path, MAX_RESULT_BYTES)
    except FileNotFoundError:
        raise ProgramFailed(f"{program} ended well but left no result") from None
    except (OSError, ValueError) as error:
        raise ProgramFailed(f"{program} ended well but left a bad result: {error}") from None
    # The daemon itself uses this name for lines of the journal. A program must not write there.
    result.pop("events", None)
    return result


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
    if _nesting(value) > MAX_NESTING:
        raise ValueError(f"nested more than {MAX_NESTING} deep")
    return value


def _nesting(value: JsonObject) -> int:
    """How many objects and lists lie inside each other; counted level by level, so that no depth exhausts the stack."""
    depth = 0
    level: list[Any] = [value]
    while level:
        depth += 1
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for group in inner for one in group if isinstance(one, dict | list)]
    return depth


# --- the program's side ---


class ProgressWriter:
    """Writes the progress file, always as a whole. Without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._shown_at = path, 0.0

    def show(self, done: int, total: int, unit: str, *, last: bool = False, **fields: object) -> None:
        """Say how far the work is, unless that was said a moment ago. `fields`: reward_mean, tokens_per_s, note."""
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


Main = Callable[[Spec, Settings, ProgressWriter], Mapping[str, object] | None]


def run_worker(main: Main[Spec], stays: Callable[[], bool] = lambda: False) -> int:
    """Read the spec, run `main(spec, settings, progress)`, leave its result; gives the exit code.

    A program may declare the spec as a TypedDict of the fields that it reads; nothing checks the file, since our own phases wrote it.
    `main` returns None in a process that leaves no result: of the many processes of one update, one does.
    `stays`: asked after each job whether this process takes another, where its daemon keeps the program (kept_program.py).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True, help="the JSON file that says what to do")
    spec: Path | None = parser.parse_args().spec
    code, jobs = 0, None
    while spec is not None:
        code = _do(main, spec)
        if code or JOBS not in os.environ or not stays():
            break
        jobs = jobs or Jobs(Path(os.environ[JOBS]))
        spec = jobs.next()
    return code


def _do(main: Main[Spec], spec_file: Path) -> int:
    """One job; gives the exit code."""
    spec = json.loads(spec_file.read_text())
    started_s = time.monotonic() - spec.get("launched_at", time.monotonic())
    signal.signal(signal.SIGTERM, signals.end)
    settings = Settings.from_json(spec["settings"])
    files.set_shared_group(settings.shared_group)
    # Libraries write files too, and do not know the modes that the run asks for.
    os.umask(0o007 if settings.shared_group else 0o077)
    try:
        result = main(spec, settings, ProgressWriter(Path(spec["progress"])))
    except FsbarrierError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code if error.exit_code == 2 else 1
    except OSError as error:
        # Libraries raise OSError for errors of their own too. Those have no errno, and their traceback helps.
        if error.errno is None:
            raise
        print(f"{error.filename or 'a file'}: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    if result is not None:
        timed = {**result, "start_s": round(started_s, 3)}
        files.write_atomic(Path(spec["result"]), json.dumps(timed).encode())
    return 0
