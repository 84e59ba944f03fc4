"""A node's life after it has joined: its looks and heartbeats, how long it retries while the filesystem fails, and its end.

`NodeLife` drives a `NodeLoop` (loop.py). It has two entry points. Each takes the time and returns the pause until its next call; there is
no clock and no thread here. The simulator calls both in virtual time.

- The daemon's main thread calls `look` until `loop.exit` is set. One call is one tick: look at the shared directory, decide, and perform
  one action. The pauses are short at first and grow while nothing happens (polling.py).
- The daemon's heartbeat thread calls `beat` until `loop.exit` is set, and then once more. The last heartbeat says how the node ended.

The heartbeats have a thread of their own so that a slow disk or a slow action does not look like death. But they depend on the looks:
`beat` writes nothing when the last complete look is too old. So a node whose loop hangs falls silent, and the others go on without it.

The node's work runs in a third thread (run/job_runner.py), which calls neither method. A heartbeat shows the work's progress, and a look
takes its report, from which the state machine decides what to publish.

An OSError in a look or an action is retried for `outage_s`. Then the node leaves. It leaves at once after Fenced (another process has its
rank) and StoreError (work cannot be ended, or cannot run here). A node that leaves ends only itself; the run goes on with the others.
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
    """Call `look` until `loop.exit` is set, and `beat` until then and once more."""

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
        """`unfit`: returns why no work can run on this node; None if it can. `pauses`: the first pauses of a wait. `note_beat`: called
        before each heartbeat is written. `say`: shows a person that this node cannot write or look, and later that it can again."""
        self.loop, self._unfit, self._beat_s, self._pauses = loop, unfit, beat_s, pauses
        self._note_beat, self._say, self._dice = note_beat, say, dice
        #: whether a person was told that something fails
        self._told = False
        self._pace = Pace(loop)
        self._began = now
        self._failing_since: float | None = None

    @property
    def failing(self) -> bool:
        """Whether the filesystem failed in the last look."""
        return self._failing_since is not None

    def tick(self, now: float) -> float:
        """Look, decide and act; returns the pause before the next look. If this node has to end, `loop.exit` is set.

        A failing filesystem is tried again for `outage_s`. The others may declare this node lost meanwhile. If the filesystem fails for
        all of them, they go on together afterwards.
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
            # Other errors mostly pass in a moment, so a person hears of them only when they last.
            self._tell(error, f"it tries again, and ends after {outage_s:g} s in vain")

    def _tell(self, error: OSError, then: str) -> None:
        """Tell a person once what fails and what to do."""
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
        """End this node and not the run. The others see that in its last heartbeat, and go on without it. An unwritable journal raises
        nothing."""
        with contextlib.suppress(OSError):
            self.loop.write_event(
                "node_ended", self.loop.node, {"state": "left", "code": code, "reason": reason}
            )
        self.loop.exit = Exit(code, "left", reason)

    def beat(self, now: float) -> float:
        """Write a heartbeat; returns the pause before the next one.

        A heartbeat says that this process lives and has looked lately. A node whose loop hangs must not look alive, or the others would
        wait for it for ever. So no heartbeat is written once a look or an action has lasted for `suspect_s` / 2, or looks have failed
        for as long. It is half because the others count the silence only from the last heartbeat. A node that can look but has no room
        to write continues its heartbeats.
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
        # After a pause of the loop, the others should see soon that it looks again.
        hurries = held_back or loop.node.stage is Stage.JOINING
        return next_beat_s(JOINING_BEAT_S if hurries else self._beat_s, self._dice)
