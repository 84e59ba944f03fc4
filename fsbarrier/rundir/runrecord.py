"""run.json: a run's author, settings, tasks and model. Node 0 writes it once, and every node works from it.

It is readable JSON. The field "digest" is the SHA-256 of all other fields, so a torn, edited or foreign file is recognised. The
declaration of a setting says whether a later start may change it (settings/section.py, `Changes`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import msgspec
from msgspec import Meta

import fsbarrier
from fsbarrier.errors import StoreError, TooFewNodes, UsageError
from fsbarrier.network.this_host import user_at_host
from fsbarrier.protocol.codec import FORMAT, ready
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import Settings
from fsbarrier.store import files, reading
from fsbarrier.store.retry import HIDDEN_S, Backoff, fails, fails_or_hides, patiently

# The record is linked into place atomically, so a mount that shows it torn for longer than this is broken.
TORN_S = 5.0
# how often a waiting node says that it waits
SAY_AGAIN_S = 60.0
# the pauses between two looks
LOOKS = Backoff(0.001, 0.25)


class TaskSource(TypedDict):
    """The task file of one split. A dictionary, since programs read it (`ctx.tasks["train"]["count"]`)."""

    path: str
    #: all tasks of the file
    count: int
    #: the numbers of the tasks that belong to a set; absent: all tasks
    picked: NotRequired[Sequence[int]]
    #: empty until the built-in task has been made
    sha256: str


def numbers_in(source: TaskSource) -> Sequence[int]:
    """The numbers of the file's tasks that the run uses."""
    return source.get("picked", range(source["count"]))


#: the names in a run directory that decide which code its nodes run
STEERING = ("run.json", "coordination")


@ready
@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of run.json.

    `created`: UTC, ISO 8601. `created_by`: user@host. `tasks`: split -> {"path", "count", "sha256"}. `model`: the folder of the first
    policy. `log_path`: the run directory's path on this node, which is not in the file.
    """

    #: folders are named after it
    run_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    created: str
    created_by: str
    version: str
    settings: Settings
    settings_digest: str
    tasks: Mapping[str, TaskSource] = field(default_factory=dict)
    model: str | None = None
    log_path: Path = Path()

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.log_path)

    @property
    def origin(self) -> str:
        """The record's path and author, for messages."""
        return f"{shown_path(self.paths.record)} made by {self.created_by} on {self.created}"


class _Torn(ValueError):
    """Not a whole record."""


class _NotWholeYet(_Torn):
    """The mount may show the rest in a moment."""


# --- making -------------------------------------------------------------------------------------------------------------


def new(
    log_path: Path, settings: Settings, *, tasks: Mapping[str, TaskSource], model: str | None
) -> RunRecord:
    """A record for a new run. Nothing is written."""
    now = datetime.now(UTC)
    return RunRecord(
        run_id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}",
        created=now.isoformat(timespec="seconds"),
        created_by=user_at_host(),
        version=fsbarrier.__version__,
        settings=settings,
        settings_digest=settings.digest,
        tasks=tasks,
        model=model,
        log_path=log_path,
    )


def publish(record: RunRecord) -> RunRecord:
    """Make the run directory and create the record durably. Returns the valid record, which is another start's if that was first.

    Raises UsageError if the directory cannot be made or written, StoreError if its filesystem fails.
    """
    new_folders = [folder for folder in (record.log_path, *record.log_path.parents) if not folder.exists()]
    try:
        files.make_dirs(record.log_path)
        won = patiently(
            lambda: files.create_exclusive(record.paths.record, encode(record)),
            HIDDEN_S,
            passes=fails_or_hides,
        )
    except OSError as error:
        # Leave nothing behind. `rmdir` spares a folder that another start is already using, since it is not empty.
        for folder in new_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if fails(error):
            raise StoreError(f"--log-path {shown_path(record.log_path)}: {error.strerror or error}") from None
        raise UsageError(
            f"--log-path {shown_path(record.log_path)}: cannot be written: {error.strerror or error}"
        ) from None
    return record if won else load(record.log_path)


def encode(record: RunRecord) -> bytes:
    """The content of the record's file."""
    named = {item.name: getattr(record, item.name) for item in fields(record) if item.name != "log_path"}
    body = {"format": FORMAT, **msgspec.to_builtins(named)}
    return json.dumps({**body, "digest": _digest(body)}, indent=2).encode() + b"\n"


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- reading ------------------------------------------------------------------------------------------------------------


def exists(log_path: Path) -> bool:
    """Whether `log_path` contains a run's record. The directory is listed, since an NFS client would cache a failed lookup."""
    try:
        return RunPaths(log_path).record.name in patiently(lambda: os.listdir(log_path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(log_path, error) from None


def without_record(log_path: Path) -> list[str]:
    """The names in `log_path` if it has no run's record, except those that a start or a launcher makes before the record."""
    paths = RunPaths(log_path)
    before = (paths.logs.name, paths.demo.name, paths.first_policy.name, "lost+found")
    try:
        names = [name for name in os.listdir(log_path) if name not in before and not name.startswith(".")]
    except FileNotFoundError:
        return []
    foreign = [name for name in names if not _is_empty_folder(log_path / name)]
    # Another start may be making this run. It makes the record first, so the record would be listed now.
    return sorted(foreign) if foreign and not exists(log_path) else []


def _is_empty_folder(path: Path) -> bool:
    """Whether a folder is empty. The lost+found of a freshly mounted disk does not count."""
    try:
        return set(os.listdir(path)) <= {"lost+found"}
    except OSError:
        return False


def load(log_path: Path) -> RunRecord:
    """The record of the run in `log_path`. Raises UsageError if there is none that this version can read."""
    if not exists(log_path):
        absent = "not a directory" if log_path.exists() else "no such directory"
        why = "no run.json" if log_path.is_dir() else absent
        raise UsageError(f"--log-path {shown_path(log_path)}: no run there ({why}); name a run's directory")
    return _read(log_path)


def wait(log_path: Path, timeout_s: float, *, on_wait: Callable[[str], None] | None = None) -> RunRecord:
    """Wait for node 0 to make the record of the run in `log_path`, with back-off up to 0.25 s.

    `on_wait` is called with a message at first, and every `SAY_AGAIN_S` seconds. Raises TooFewNodes after `timeout_s`, UsageError for a
    bad record.
    """
    begin, say_after = time.monotonic(), 1.0
    idle, pauses = threading.Event(), iter(LOOKS)
    while True:
        if exists(log_path):
            return _read(log_path)
        waited = time.monotonic() - begin
        if waited >= timeout_s:
            raise TooFewNodes(
                f"node 0 has not made {shown_path(RunPaths(log_path).record)} within {timeout_s:g} s; "
                "is it started (--master), with the same --log-path?"
            )
        if on_wait and waited > say_after:
            still = f" ({waited:.0f} s so far)" if say_after > 1.0 else ""
            record = shown_path(RunPaths(log_path).record)
            on_wait(f"waiting up to {timeout_s:g} s for node 0 (--master) to make {record}{still}")
            say_after = waited + SAY_AGAIN_S
        idle.wait(min(next(pauses), timeout_s - waited))


def _read(log_path: Path) -> RunRecord:
    """Read the record in `log_path`, which is listed, once this mount shows it whole. Raises UsageError, StoreError."""
    path = RunPaths(log_path).record
    try:
        record = patiently(
            lambda: decode(patiently(lambda: _read_bytes(path)), log_path),
            TORN_S,
            passes=lambda error: isinstance(error, _NotWholeYet),
        )
    except _Torn as error:
        raise UsageError(f"{shown_path(path)}: {error}; use another --log-path") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    _refuse_links(record.paths)
    return record


def _refuse_links(paths: RunPaths) -> None:
    """Refuse links in place of the run's folders, so that it writes and removes files only below its directory. Raises UsageError."""
    own_folders = (
        paths.coordination,
        paths.checkpoints,
        paths.logs,
        paths.events,
        paths.trackers,
        *map(paths.trajectories, SPLITS),
    )
    for folder in (*own_folders, *paths.listed, paths.batches):
        if folder.is_symlink():
            raise UsageError(
                f"{shown_path(folder)}: is a link, and a run follows none below its directory; put the folder itself there "
                "(or mount it), or use another --log-path"
            )


def _read_bytes(path: Path) -> bytes:
    try:
        return reading.read_bytes(path, reading.RUN_RECORD_BYTES)
    except reading.NotPlain as error:
        raise _Torn(f"not a run's record: {error.strerror}") from None
    except IsADirectoryError:
        raise _Torn("not a run's record: it is a folder") from None
    except FileNotFoundError:
        raise _NotWholeYet("it was listed, but it is not there") from None


def _unreadable(path: Path, error: OSError) -> Exception:
    if isinstance(error, PermissionError):
        return UsageError(
            f"{shown_path(path)}: not yours to read; the run's owner can start it with --shared-group, or use another --log-path"
        )
    return StoreError(f"{shown_path(path)}: cannot be read: {error.strerror or error}")


def decode(data: bytes, log_path: Path) -> RunRecord:
    """The record in a file's content. Raises UsageError for another format, ValueError for anything but a whole record."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise _NotWholeYet("torn, or not a run's record (no JSON)") from None
    if not isinstance(body, dict) or not isinstance(written := body.get("format"), int):
        raise _Torn("not a run's record (no format)")
    # Nodes with two record formats would not see each other: a split brain.
    if written != FORMAT:
        raise UsageError(
            f"{shown_path(RunPaths(log_path).record)}: its nodes write record format {written}, as fsbarrier {body.get('version')} does; "
            f"this fsbarrier {fsbarrier.__version__} reads and writes format {FORMAT}"
        )
    if body.pop("digest", None) != _digest(body):
        raise _Torn("torn or edited: its digest does not fit (settings of a run cannot be changed by hand)")
    try:
        return replace(msgspec.convert(body, RunRecord), log_path=log_path)
    except (msgspec.ValidationError, UnicodeError) as error:
        # JSON may contain half of a surrogate pair, which is no valid text.
        raise _Torn(f"not a run's record ({error})") from None


# --- the tasks ---------------------------------------------------------------------------------------------------------------


def check_tasks(record: RunRecord) -> None:
    """Raises UsageError if a task file is missing, or is not the one that the run began with."""
    for split, source in record.tasks.items():
        path = Path(source["path"])
        try:
            same = files.sha256_file(path) == source["sha256"]
        except OSError as error:
            raise UsageError(
                f"{path}: this run's {split} tasks cannot be read: {error.strerror or error}"
            ) from None
        if not same:
            raise UsageError(
                f"{path}: not the {split} tasks that this run began with (SHA-256 differs from {shown_path(record.paths.record)}); "
                "put the file back or use another --log-path"
            )


def shown_path(path: Path) -> str:
    """The path to show to people: relative to the working directory if that is shorter and does not go up."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return str(path)
    return str(path) if relative.startswith("..") or len(relative) > len(str(path)) else relative
