"""The thread that writes a group member's heartbeats, also while the caller computes. A daemon thread: it keeps no interpreter alive."""

from __future__ import annotations

import threading
import time

from fsbarrier.coordination.group.member import GroupMember
from fsbarrier.errors import Fenced
from fsbarrier.rundir.record_store import PosixStore


class HeartbeatThread:
    """Writes heartbeats every `beat_s` seconds from `start` to `end`, but not while a look hangs: the others should not wait for ever."""

    def __init__(self, member: GroupMember, beat_s: float) -> None:
        self._member, self._beat_s, self._ending = member, beat_s, threading.Event()
        self._thread = threading.Thread(target=self._write_heartbeats, name="fsbarrier-beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, why: str, within_s: float) -> None:
        """Tell the others that this member leaves, and why; give up after `within_s`, as on a filesystem that hangs. Never raises."""
        self._member.work.leaving = why
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _write_heartbeats(self) -> None:
        member, store, last = self._member, PosixStore(), False
        # A newer start has this rank, or the others went on: nobody reads this heartbeat any more.
        while not last and not isinstance(member.failure, Fenced):
            last = self._ending.is_set()
            pause_s = member.beat(store, time.monotonic(), self._beat_s, last=last)
            if not last:
                self._ending.wait(pause_s)
