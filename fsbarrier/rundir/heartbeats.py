"""Reads heartbeats, for daemons, views, and commands that need to know whether a node is alive.

Each start of a node replaces one file repeatedly, with a growing counter. The file has no time, since the clocks of two hosts may differ:
a node is alive as long as others see its counter move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsbarrier.protocol.facts import Beat
from fsbarrier.protocol.membership import GONE
from fsbarrier.protocol.state import Stage
from fsbarrier.retry import FAILING, retry
from fsbarrier.rundir.names import PULSE, START, PulseName, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore, Store

LOOK_S = 0.05


@dataclass
class HeartbeatReader:
    """Reads the heartbeats in `folder` repeatedly.

    Usually only the counter of a heartbeat is new, and the listing shows it already: beside its heartbeat each running node has a
    *pulse*, a file that it renames to the new counter. With `pulses`, a heartbeat is not opened if its pulse has moved since the last
    listing, in the same generation. If a pulse has not moved, perhaps because the listing is stale, the heartbeat is opened. The other
    fields of a heartbeat (how the node ended, how far it is) are as old as its last read.
    """

    store: Store
    folder: Path
    pulses: bool = False
    _listing: list[str] = field(default_factory=list)
    _starts: dict[int, list[StartName]] = field(default_factory=dict)
    #: the newest listed pulse of each start, and the starts whose pulse has moved in the last listing
    _pulses: dict[StartName, PulseName] = field(default_factory=dict)
    _moved: set[StartName] = field(default_factory=set)
    #: the last heartbeat of each start that `read` has yielded
    _given: dict[StartName, Beat] = field(default_factory=dict)

    def read(
        self, wanted: Callable[[StartName], bool] = lambda newest: True
    ) -> Iterator[tuple[StartName, Beat | None]]:
        """Each rank's newest start, and the newest readable heartbeat of its starts (None: none is readable).

        `wanted` decides by a rank's newest start whether to read that rank. Raises OSError.
        """
        self._list()
        for starts in self._starts.values():
            if wanted(starts[0]):
                yield starts[0], self._newest_of(starts)

    def _list(self) -> None:
        listing = self.store.names(self.folder)
        self._moved.clear()
        if listing == self._listing:
            return
        known, self._listing, self._starts = set(self._listing), listing, {}
        for start in sorted(START.parse_all(listing), reverse=True):
            self._starts.setdefault(start.rank, []).append(start)
        for pulse in PULSE.parse_all(set(listing) - known) if self.pulses else ():
            start = StartName(pulse.rank, pulse.incarnation)
            before = self._pulses.get(start)
            if before is None or pulse.counter > before.counter:
                self._pulses[start] = pulse
                if before is not None:
                    self._moved.add(start)

    def _newest_of(self, starts: list[StartName]) -> Beat | None:
        for start in starts:
            path = self.folder / START.build(start.rank, start.incarnation)
            beat = self._by_pulse(start) or self.store.read(path, Beat)
            if beat is not None and (beat.rank, beat.incarnation) == (start.rank, start.incarnation):
                self._given[start] = beat
                return beat
        return None

    def _by_pulse(self, start: StartName) -> Beat | None:
        """The heartbeat of a start with the counter of its pulse; None if the heartbeat must be opened."""
        last = self._given.get(start)
        if last is None or start not in self._moved:
            return None
        pulse, runs = self._pulses[start], last.state == Stage.RUNNING
        further = pulse.counter > last.counter and pulse.generation == last.generation
        return replace(last, counter=pulse.counter) if runs and further else None


def read_beats(log_path: Path, rank: int | None = None) -> dict[int, Beat]:
    """The last heartbeat of each rank (or only of `rank`) in a run, without unreadable ones. Raises OSError."""
    found = read_newest_starts(log_path, rank)
    return {start.rank: beat for start, beat in found if beat is not None}


def read_newest_starts(log_path: Path, rank: int | None = None) -> list[tuple[StartName, Beat | None]]:
    """The newest start of each rank (or only of `rank`) with a heartbeat, and the newest readable heartbeat, maybe of an older start.

    Raises OSError.
    """
    reader = HeartbeatReader(PosixStore(), RunPaths(log_path).beats)
    return retry(lambda: [*reader.read(lambda newest: rank is None or newest.rank == rank)], errnos=FAILING)


def iteration_of_others(log_path: Path, rank: int) -> int:
    """The last iteration of the nodes other than `rank` that have not ended; 0 if there are none. Raises OSError."""
    beats = [beat for beat in read_beats(log_path).values() if beat.rank != rank and beat.state not in GONE]
    return max((beat.iteration for beat in beats), default=0)


def live_nodes(log_path: Path, watch_s: float, rank: int | None = None) -> list[Beat]:
    """The nodes (or only `rank`) whose counter moves within `watch_s` seconds; for commands that are not nodes themselves.

    Returns as soon as every node is known to be alive or gone. An unreadable heartbeat may belong to a live node, which is just replacing
    it. Raises OSError.
    """
    before, alive = beats_of_newest_starts(log_path, rank), dict[int, Beat]()
    unknown = {node for node, beat in before.items() if beat is None or beat.state not in GONE}
    pause, deadline = threading.Event(), time.monotonic() + watch_s
    while unknown - alive.keys() and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        for node, beat in beats_of_newest_starts(log_path, rank).items():
            if beat is None:
                continue
            if beat.state in GONE:
                unknown.discard(node)
            elif node in before and before[node] is None:
                # The first successful read, from which on a change counts.
                before[node] = beat
            elif beat != before.get(node):
                alive[node] = beat
    return [alive[node] for node in sorted(alive)]


def beats_of_newest_starts(log_path: Path, rank: int | None = None) -> dict[int, Beat | None]:
    """The heartbeat of each rank's newest start; None if it is unreadable, even if an older start's is not. Raises OSError."""
    return {
        start.rank: beat if beat is not None and beat.incarnation == start.incarnation else None
        for start, beat in read_newest_starts(log_path, rank)
    }
