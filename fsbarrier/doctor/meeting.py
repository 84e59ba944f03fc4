"""Brings the doctors of several nodes together in a group of their own below the directory they examine, and tidies up after them.

They find each other in a lobby, join a group (`fsbarrier.join`) in a session folder named after one of them, and all that they say to each
other is said with `all_gather`: who falls silent, leaves or does not answer is the group's to find out. A doctor's record in the lobby
stays until it has left the group; the last one takes everything away, and what a killed doctor left goes with the next visit.
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
#: the directory is here to be examined, and may show heartbeats half a minute late
BEAT_S, SUSPECT_S, SILENT_S = 1.0, 10.0, 35.0
#: what one exchange may take on a mount that shows things late
ANSWER_S = 40.0
#: what has not changed for so long was left by a doctor that was killed
LEFTOVER_S = 5.0
#: how long the leader gives the others to go (one whose mount lists old names hears the last word some seconds later), and how long a
#: folder may take to vanish that others still write to
BYE_S, REMOVE_S = 15.0, 12.0


class Interruption:
    """Its `handle` is the handler of signals; they end the command by a SystemExit with their exit code.

    The first one is only noted, and raised where the doctor calls `heed`: its threads are at work, and an exception out of nowhere
    can break the joining of one. Inside `at_once`, where it only waits, it is raised on the spot; so is a second signal, anywhere.
    """

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._at_once = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
        if self._at_once or len(self._noted) > 1:
            self.heed()

    def heed(self) -> None:
        """Raise SystemExit if a signal has come."""
        if self._noted:
            raise SystemExit(128 + self._noted[0])

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal interrupt what is done inside."""
        self._at_once = True
        try:
            self.heed()
            yield
        finally:
            self._at_once = False


class Meeting:
    """One node's part, in a `with` block that begins with `meet`; whatever ends it, nothing of this doctor stays."""

    def __init__(self, path: Path, num_nodes: int, rank: int | None, interruption: Interruption) -> None:
        """`rank`: None where nobody says it."""
        self.folder = path / FOLDER
        self.lobby = Lobby(self.folder / "lobby", num_nodes, rank)
        self.interruption = interruption
        #: who is here, by rank, this node too; empty until all have found each other
        self.members: dict[int, Visitor] = {}
        self._group: Group | None = None
        #: the tokens of those that were lost on the way
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
        """A folder for this visit."""
        return self.folder / min(visitor.token for visitor in self.members.values())

    @property
    def on_one_host(self) -> bool:
        return len({visitor.boot_id for visitor in self.members.values()}) == 1

    def meet(self, wait_s: float, say: Callable[[str], None]) -> None:
        """Wait for the others. `say` is told whom for.

        Raises TooFewNodes past the deadline, UsageError where the nodes contradict each other, StoreError where they find each
        other and no group can be had, OSError.
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
        """Say something (JSON data), and hear what every node says at this point.

        Raises TooFewNodes naming who fell silent, StoreError where the filesystem does not carry the group.
        """
        assert self._group is not None
        with self._naming_the_lost(name):
            return dict(zip(self._group.members, self._group.all_gather(message), strict=True))

    @contextlib.contextmanager
    def _naming_the_lost(self, awaited: str) -> Iterator[None]:
        """Around a wait of the group's, which a signal may interrupt: its errors as the doctor's. Raises TooFewNodes."""
        try:
            with self.interruption.at_once():
                yield
        except (PeerLost, BarrierTimeout) as error:
            visitor, left = self.members[error.rank or 0], isinstance(error, PeerLost)
            # One that is only slow goes on, and takes everything away when it finds itself alone.
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
            # All found each other and this one could not join: the others are to find so much, too.
            threading.Event().wait(LINGER_S)
        with contextlib.suppress(OSError):
            self.lobby.leave()
            self._remove_session(responsible=kind is None and self.rank == 0)
            self._remove_leftovers()
        for emptied in (self.lobby.folder, self.folder):
            # Neither is empty while other doctors are here.
            with contextlib.suppress(OSError):
                emptied.rmdir()

    # --- going --------------------------------------------------------------------------------------------------------

    def _remove_session(self, *, responsible: bool) -> None:
        """Remove this visit's folder if all the others have gone. Raises OSError.

        `responsible`: wait for that, and remove it after a while also if they seem to be there: this mount may list old names.
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
        """Remove what was here before this doctor came and has not changed since. Raises OSError."""
        if time.monotonic() - self._begin < LEFTOVER_S:
            return
        now = self._of_others()
        same = {path for path, content in self._found_at_start.items() if now.get(path) == content}
        # The records of doctors that examine something do not change either; their session does. This doctor's own session ends now,
        # and may still be here because the others have not gone yet.
        ours = {self.session} if self.members else set()
        busy = any(path.parent == self.folder for path in now.keys() - same - ours)
        for path in same:
            if path.parent == self.folder:
                _remove_tree(path)
            elif not busy:
                path.unlink(missing_ok=True)

    def _of_others(self) -> dict[Path, object]:
        """What doctors have put here, with what changes while they live. Raises OSError."""
        found: dict[Path, object] = {}
        for folder in _listed(self.folder):
            # Another doctor may take the folder away between two reads of it.
            with contextlib.suppress(FileNotFoundError):
                if folder != self.lobby.folder and folder.is_dir():
                    found[folder] = read_beats(folder / "group")
        for path in _listed(self.lobby.folder):
            visitor = visitor_of(path)
            # A temporary file is what a killed doctor was writing: no write takes as long as a visit.
            if path.name.startswith(".") or visitor is not None:
                found[path] = visitor
        return found


def _listed(folder: Path) -> list[Path]:
    """What is in the folder; nothing where there is none. Raises OSError."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _remove_tree(folder: Path) -> None:
    """Remove a folder with what is in it; what others put there may be listed late."""

    def removed() -> bool | None:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists() or None

    wait_for(removed, time.monotonic() + REMOVE_S)
