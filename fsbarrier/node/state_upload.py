"""Copies this node's part of a trainer state to the shared directory during the next rollouts.

The trainer left it on the node (training/node_state.py), and the version's manifest lists the missing files as `following`. A file gets
its name when it is complete and flushed, so the state is complete when the last node's last file has its name. That needs no agreement,
and a restarted node resumes the copy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier import files
from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.hashed_file import FileDigest, HashedFile

if TYPE_CHECKING:
    from fsbarrier.node.job import Result, RowJob

# How often a waiting job checks whether it was cancelled.
LOOK_S = 0.25


class StateUpload:
    """Uploads one version at a time, in its own thread."""

    def __init__(self) -> None:
        self._version: Path | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._alive_at = self._began = 0.0
        self._failed = ""

    def begin(self, version: Path, kept: Path) -> None:
        """Start copying the files that the folder `version` lacks from `kept`. Raises ProgramFailed if the manifest is unreadable."""
        if version == self._version or not (version / checkpoints.MANIFEST).exists():
            return
        manifest = checkpoints.read_manifest(version)
        lacking = checkpoints.still_to_come(version, manifest)
        mine = {name: manifest.following[name] for name in lacking if (kept / name).exists()}
        if self._thread is None and mine:
            self._version, self._failed, self._began = version, "", time.monotonic()
            self._thread = threading.Thread(
                target=self._copy_all, args=(version, kept, mine), name="state", daemon=True
            )
            self._thread.start()

    def wait(self, job: RowJob) -> list[Result]:
        """Wait until it is done; returns the line for the journal. Raises Cancelled."""
        if self._thread is None or self._version is None:
            return []
        name = self._version.name
        job.progress = {"note": f"waiting for the trainer state of {name}"}
        with job.using_directory(f"saving the trainer state of {name}"):
            while self._thread.is_alive():
                job.stop_if_cancelled()
                job.alive_at = max(job.alive_at, self._alive_at)
                self._thread.join(LOOK_S)
        self._thread = None
        seconds = round(self._alive_at - self._began, 3)
        return [{"event": "trainer_state_saved", "serving": name, "seconds": seconds, "error": self._failed}]

    def stop(self) -> None:
        """Stop copying."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(LOOK_S)

    def _copy_all(self, version: Path, kept: Path, mine: dict[str, FileDigest]) -> None:
        try:
            for name, digest in mine.items():
                self._copy(kept / name, version / name, digest)
            files.fsync_dir(version / "trainer")
        except (OSError, ProgramFailed) as error:
            self._failed = str(error)
        self._alive_at = time.monotonic()

    def _copy(self, source: Path, target: Path, digest: FileDigest) -> None:
        # Leftovers of a killed start of this node; nobody else writes this file.
        for left in target.parent.glob(f".{target.name}.*.tmp"):
            left.unlink()
        temporary = files.temporary_beside(target)
        try:
            with source.open("rb") as stream, HashedFile(temporary) as copy:
                while not self._stopping.is_set() and (block := stream.read(files.READ_BYTES)):
                    copy.write(block)
                    self._alive_at = time.monotonic()
            if copy.digest != digest:
                raise ProgramFailed(f"{source} is not what the trainer wrote")
            files.rename(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
