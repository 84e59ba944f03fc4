"""A node's life after it has joined: its looks and heartbeats, how long it holds out while things fail, and its end.

Time is passed in; there is no clock and no thread here. The daemon calls `look` in one thread and `beat` in another, the simulator both
in virtual time; each waits for as long as the answer says.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.poll_intervals import DICE, next_beat_s
from fsbarrier.coordination.polling import Pace
from fsbarrier.errors import Fenced, StoreError
from fsbarrier.protocol.facts import Beat
from fsbarrier.protocol.state import Exit, Stage
from fsbarrier.store.retry import Backoff

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
        dice: random.Random = DICE,
    ) -> None:
        """`unfit`: why no work can run on this node, if so. `pauses`: the first pauses of a wait. `note_beat`: called before each
        heartbeat is written."""
        self.loop, self._unfit, self._beat_s, self._pauses = loop, unfit, beat_s, pauses
        self._note_beat, self._dice = note_beat, dice
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
        busy = False
        try:
            busy = self.loop.tick(now)
            if (unfit := self._unfit()) is not None:
                raise unfit
            self._failing_since = None
        except OSError as error:
            self._hold_out(error, now)
        except (Fenced, StoreError) as error:
            self.leave(error.exit_code, str(error))
        return self._pace.next_pause(now, self._pauses, busy=busy)

    def _hold_out(self, error: OSError, now: float) -> None:
        self._failing_since = now if self._failing_since is None else self._failing_since
        outage_s, where = self.loop.observer.intervals.outage_s, self.loop.observer.paths.root
        if now - self._failing_since >= outage_s:
            why = f"node {self.loop.node.rank}: {where} has failed for {outage_s:g} s: {error}"
            self.leave(StoreError.exit_code, why)

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

        A node whose loop hangs must not look alive, or the others would wait for it for ever. So there are no heartbeats while the loop
        has not looked, or only in vain, for `suspect_s` / 2. Half, because the others count its silence only from the last heartbeat.
        """
        loop = self.loop
        looked_at = self._began if loop.observer.looked_at is None else loop.observer.looked_at
        held_back = now - looked_at > loop.rules.limits.suspect_s / 2 and loop.exit is None
        if not held_back:
            beat = loop.beat()
            self._note_beat(beat)
            loop.write_beat(beat, now)
        # If the loop was only paused, the others should see that at once when it looks again.
        hurries = held_back or loop.node.stage is Stage.JOINING
        return next_beat_s(JOINING_BEAT_S if hurries else self._beat_s, self._dice)
