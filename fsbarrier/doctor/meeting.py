"""Brings the doctors of several nodes together in a temporary group below the examined directory, and cleans up afterwards.

The doctors find each other in a lobby, join a group (`fsbarrier.join`) in a session folder, and exchange all results with `all_gather`, so
that the group detects nodes that die or leave. A doctor's record stays in the lobby until the doctor has left the group. The last doctor
removes everything; the next visit removes files left by killed doctors.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from fsbarrier.doctor.messages import Message, wait_for
from fsbarrier.doctor.roll_call import LINGER_S, Lobby, Visitor, visitor_of
from fsbarrier.errors import BarrierTimeout, PeerLost, TooFewNodes
from fsbarrier.group import Group, join
from fsbarrier.rundir.heartbeats import read_beats

FOLDER = ".fsbarrier-doctor"
#: Generous timeouts, because the directory under test may show heartbeats half a minute late.
BEAT_S, SUSPECT_S, SILENT_S = 1.0, 10.0, 35.0
#: timeout of one exchange on a slow mount
ANSWER_S = 40.0
#: files unchanged for this long belong to a killed doctor
LEFTOVER_S = 5.0
#: how long the leader waits for the others to leave (with stale listings they notice the end some seconds late), and how long it tries to
#: remove a folder to which others still write
BYE_S, REMOVE_S = 15.0, 12.0


class Interruption:
    """Turns signals into a SystemExit with their exit code; `handle` is the signal handler.

    The first signal is only recorded, and raised at the next call of `heed`, because an exception at an arbitrary point could break the
    join of a thread. Inside `at_once`, where the doctor only waits, it is raised immediately. A second signal is always raised immediately.
    """

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._at_once = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
        if self._at_once or len(self._noted) > 1:
            self.heed()

    def heed(self) -> None:
        """Raise SystemExit if a signal was recorded."""
        if self._noted:
            raise SystemExit(128 + self._noted[0])

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise signals immediately inside this context."""
        self._at_once = True
        try:
            self.heed()
            yield
        finally:
            self._at_once = False


class Meeting:
    """One node's part in the meeting. Use it in a `with` block that begins with `meet`; it removes this doctor's files on exit."""

    def __init__(self, path: Path, num_nodes: int, rank: int | None, interruption: Interruption) -> None:
        """`rank`: None if unknown."""
        self.folder = path / FOLDER
        self.lobby = Lobby(self.folder / "lobby", num_nodes, rank)
        self.interruption = interruption
        #: all doctors by rank, including this one; empty until all have arrived
        self.members: dict[int, Visitor] = {}
        self._group: Group | None = None
        #: tokens of lost doctors
        self._lost: set[str] = set()
        self._begin = time.monotonic()
        self._found_at_start: dict[Path, object] = {}

    @property
    def token(self) -> str:
        return self.lobby.me.token

    @property
    def rank(self) -> int:
        return next(rank for rank, visitor in self.members.items() if visitor.token == self.token)

    @property
    def session(self) -> Path:
        """The folder of this session."""
        return self.folder / min(visitor.token for visitor in self.members.values())

    @property
    def on_one_host(self) -> bool:
        return len({visitor.boot_id for visitor in self.members.values()}) == 1

    def meet(self, wait_s: float, say: Callable[[str], None]) -> None:
        """Wait for the other doctors and form the group. `say` receives progress messages.

        Raises TooFewNodes past the deadline, UsageError if the nodes' flags contradict each other, StoreError if they find each other but
        cannot form a group, OSError.
        """
        self._found_at_start = self._of_others()
        self.members = self.lobby.gather(wait_s, say, self.interruption.heed)
        with self._naming_the_lost("that it is here"):
            self._group = join(
                self.session / "group",
                node_rank=self.rank,
                num_nodes=len(self.members),
                timeout_s=ANSWER_S,
                beat_s=BEAT_S,
                suspect_s=SUSPECT_S,
                dead_s=SILENT_S,
            )

    def exchange(self, name: str, message: object) -> dict[int, Message]:
        """All-gather JSON data.

        Raises TooFewNodes naming a node that stopped answering, StoreError if the group fails on this filesystem.
        """
        assert self._group is not None
        with self._naming_the_lost(name):
            return dict(zip(self._group.members, self._group.all_gather(message), strict=True))

    @contextlib.contextmanager
    def _naming_the_lost(self, awaited: str) -> Iterator[None]:
        """Allow signals during a wait of the group, and turn its errors into TooFewNodes."""
        try:
            with self.interruption.at_once():
                yield
        except (PeerLost, BarrierTimeout) as error:
            visitor, left = self.members[error.rank or 0], isinstance(error, PeerLost)
            # A node that is only slow will continue, find itself alone, and clean up.
            if left or (error.age or 0.0) >= SILENT_S:
                self._lost.add(visitor.token)
            what = "left before it said" if left else f"has not said within {ANSWER_S:g} s"
            raise TooFewNodes(f"doctor: node {error.rank} ({visitor.host}) {what}: {awaited}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            self._group.__exit__(kind, error, trace)
        elif self.members:
            # This node could not join. Stay visible for a moment so that the others come to the same result.
            threading.Event().wait(LINGER_S)
        with contextlib.suppress(OSError):
            self.lobby.leave()
            self._remove_session(responsible=kind is None and self.rank == 0)
            self._remove_leftovers()
        for emptied in (self.lobby.folder, self.folder):
            # rmdir fails while other doctors have files there.
            with contextlib.suppress(OSError):
                emptied.rmdir()

    # --- clean-up -----------------------------------------------------------------------------------------------------

    def _remove_session(self, *, responsible: bool) -> None:
        """Remove the session folder if all other doctors have left. Raises OSError.

        `responsible`: wait for them, and remove it after a while even if they still seem present, because listings may be stale.
        """
        others = {visitor.token for visitor in self.members.values()} - {self.token} - self._lost

        def gone() -> bool | None:
            return others.isdisjoint(self.lobby.present()) or None

        if not self.members:
            return
        last = wait_for(gone, time.monotonic() + (BYE_S if responsible else 0.0))
        if last or responsible:
            for token in self._lost | others:
                (self.lobby.folder / token).unlink(missing_ok=True)
            _remove_tree(self.session)

    def _remove_leftovers(self) -> None:
        """Remove files that existed before this doctor arrived and have not changed since. Raises OSError."""
        if time.monotonic() - self._begin < LEFTOVER_S:
            return
        now = self._of_others()
        same = {path for path, content in self._found_at_start.items() if now.get(path) == content}
        # The records of active doctors do not change either, but their session folder does. This doctor's own session may still exist
        # because the others have not left yet.
        ours = {self.session} if self.members else set()
        busy = any(path.parent == self.folder for path in now.keys() - same - ours)
        for path in same:
            if path.parent == self.folder:
                _remove_tree(path)
            elif not busy:
                path.unlink(missing_ok=True)

    def _of_others(self) -> dict[Path, object]:
        """The doctors' files, each with data that changes while its doctor is alive. Raises OSError."""
        found: dict[Path, object] = {}
        for folder in _listed(self.folder):
            # Another doctor may remove the folder between two reads.
            with contextlib.suppress(FileNotFoundError):
                if folder != self.lobby.folder and folder.is_dir():
                    found[folder] = read_beats(folder / "group")
        for path in _listed(self.lobby.folder):
            visitor = visitor_of(path)
            # A temporary file this old belongs to a killed doctor: no write takes as long as a visit.
            if path.name.startswith(".") or visitor is not None:
                found[path] = visitor
        return found


def _listed(folder: Path) -> list[Path]:
    """The contents of the folder; empty if it does not exist. Raises OSError."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _remove_tree(folder: Path) -> None:
    """Remove a folder with its contents, and retry because new files of other nodes may be listed late."""

    def removed() -> bool | None:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists() or None

    wait_for(removed, time.monotonic() + REMOVE_S)
