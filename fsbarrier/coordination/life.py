"""A node's life after it has joined: its looks and heartbeats, how long it holds out while things fail, and its end.

Time is passed in; there is no clock and no thread here. The daemon calls `look` in one thread and `beat` in another, the simulator both
in virtual time; each waits for as long as the answer says.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

from fsbarrier.coordination.loop import LookAgain, NodeLoop
from fsbarrier.coordination.poll_intervals import DICE, next_beat_s
from fsbarrier.coordination.polling import Pace
from fsbarrier.errors import Fenced, StoreError
from fsbarrier.protocol.facts import Beat
from fsbarrier.protocol.state import Exit, Stage
from fsbarrier.store.retry import NO_ROOM, UNWRITABLE, Backoff

#: between two heartbeats of a joining node, for which the others wait
JOINING_BEAT_S = 0.2


class NodeLife:
    """`look` until `loop.exit` is set; `beat` until then, and once more."""

    def __init__(
        self,
        loop: NodeLoop,
        unfit: Callable[[], StoreError | None],
        beat_s: float,
        pauses: Backoff,
        now: float,
        *,
        note_beat: Callable[[Beat], None] = lambda beat: None,
        say: Callable[[str], None] = lambda text: None,
        dice: random.Random = DICE,
    ) -> None:
        """`unfit`: why no work can run on this node, if so. `pauses`: the first pauses of a wait. `note_beat`: called before each
        heartbeat is written. `say`: tells a person that this node cannot write or look, and when it can again."""
        self.loop, self._unfit, self._beat_s, self._pauses = loop, unfit, beat_s, pauses
        self._note_beat, self._say, self._dice = note_beat, say, dice
        #: a person was told that something fails
        self._told = False
        self._pace = Pace(loop)
        self._began = now
        self._failing_since: float | None = None

    @property
    def failing(self) -> bool:
        """Whether the filesystem failed in the last look."""
        return self._failing_since is not None

    def look(self, now: float) -> float:
        """Look, decide and act; returns the pause before the next look. What ends this node is in `loop.exit` then.

        A failing filesystem is tried again for `outage_s`. The others may declare this node lost meanwhile, but if it fails for all of
        them, they go on together afterwards.
        """
        again = LookAgain.AT_USUAL_PACE
        try:
            again = self.loop.tick(now)
            if (unfit := self._unfit()) is not None:
                raise unfit
            self._failing_since = None
        except OSError as error:
            self._hold_out(error, now)
        except (Fenced, StoreError) as error:
            self.leave(error.exit_code, str(error))
        return self._pace.next_pause(now, self._pauses, again)

    def _hold_out(self, error: OSError, now: float) -> None:
        self._failing_since = now if self._failing_since is None else self._failing_since
        intervals, where = self.loop.observer.intervals, self.loop.observer.paths.root
        failing_s, outage_s = now - self._failing_since, intervals.outage_s
        if failing_s >= outage_s:
            why = f"node {self.loop.node.rank}: {where} has failed for {outage_s:g} s: {error}"
            self.leave(StoreError.exit_code, why)
        elif error.errno in UNWRITABLE or failing_s >= 3 * self._beat_s:
            # Other errors mostly pass in a moment.
            self._tell(error, f"it tries again, and ends after {outage_s:g} s in vain")

    def _tell(self, error: OSError, then: str) -> None:
        """Say once what fails, and what to do."""
        if self._told:
            return
        self._told, root = True, self.loop.observer.paths.root
        where = Path(error.filename).parent if error.filename else root
        advice = "make room there (a quota or the inodes may be used up), " if error.errno in NO_ROOM else ""
        self._say(
            f"node {self.loop.node.rank} cannot write in {where}: {error.strerror or error}; {advice}and it goes on; {then}"
            if error.errno in UNWRITABLE
            else f"node {self.loop.node.rank}: the shared directory {root} fails: {error}; {then}"
        )

    def leave(self, code: int, reason: str) -> None:
        """End this node and not the run. The others see that in the last heartbeat, and go on without it. Never raises for an unwritable
        journal."""
        with contextlib.suppress(OSError):
            self.loop.write_event(
                "node_ended", self.loop.node, {"state": "left", "code": code, "reason": reason}
            )
        self.loop.exit = Exit(code, "left", reason)

    def beat(self, now: float) -> float:
        """Write a heartbeat; returns the pause before the next.

        It says that this process lives, and that it has looked lately: a node whose loop hangs must not look alive, or the others would
        wait for it for ever. So there are no heartbeats while a look or an action has lasted for `suspect_s` / 2, or looks have been in
        vain for as long. Half, because the others count its silence only from the last heartbeat. A node that looks, and cannot write
        for want of room, beats.
        """
        loop = self.loop
        looked_at = self._began if loop.observer.looked_at is None else loop.observer.looked_at
        held_back = now - looked_at > loop.rules.limits.suspect_s / 2 and loop.exit is None
        if not held_back:
            beat = loop.beat()
            self._note_beat(beat)
            loop.write_beat(beat, now)
            if loop.unwritable is not None and loop.unwritable.errno in UNWRITABLE:
                self._tell(loop.unwritable, "until then nobody is given up for that")
            elif self._told and loop.unwritable is None and not self.failing:
                self._told = False
                self._say(f"node {loop.node.rank} can use the shared directory again")
        # If the loop was only paused, the others should see that at once when it looks again.
        hurries = held_back or loop.node.stage is Stage.JOINING
        return next_beat_s(JOINING_BEAT_S if hurries else self._beat_s, self._dice)
