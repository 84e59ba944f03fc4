"""Heartbeats as others read them: daemons, views, and guards that ask whether a node is alive before they do something.

Each start of a node replaces one file again and again, with a counter that grows. The file holds no time, since the clocks of two
hosts may differ: a node lives while others see its counter move.
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
    """Reads the heartbeats in `folder` again and again.

    Most of them say nothing new but that their counter has moved, and that the name of the node's *pulse* says too: a file beside the
    heartbeat, which is renamed after it. So where `pulses` is set, a heartbeat is not opened if since the last listing its pulse came
    further, in the generation in which the node was seen to run. A pulse that did not move says nothing, however old the listing is,
    and the heartbeat is opened. What a node says beside its counter (how it ended, how far it is) is as old as its last opening.
    """

    store: Store
    folder: Path
    pulses: bool = False
    _listing: list[str] = field(default_factory=list)
    _starts: dict[int, list[StartName]] = field(default_factory=dict)
    #: the newest pulse of each start that was listed so far, and the starts whose pulse the last listing showed to have moved
    _pulses: dict[StartName, PulseName] = field(default_factory=dict)
    _moved: set[StartName] = field(default_factory=set)
    #: the last heartbeat of each start that was given
    _given: dict[StartName, Beat] = field(default_factory=dict)

    def read(
        self, wanted: Callable[[StartName], bool] = lambda newest: True
    ) -> Iterator[tuple[StartName, Beat | None]]:
        """For each rank its newest start, and the newest of its starts' heartbeats that can be read (None: not one).

        `wanted` gets a rank's newest start and says whether to read that rank. Raises OSError.
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
        """The heartbeat of a start as its pulse tells it; None where the heartbeat itself is to be opened."""
        last = self._given.get(start)
        if last is None or start not in self._moved:
            return None
        pulse, runs = self._pulses[start], last.state == Stage.RUNNING
        further = pulse.counter > last.counter and pulse.generation == last.generation
        return replace(last, counter=pulse.counter) if runs and further else None


def read_beats(log_path: Path, rank: int | None = None) -> dict[int, Beat]:
    """The last heartbeat of each rank (of `rank` alone, if given) in a run; unreadable ones are left out. Raises OSError."""
    found = read_newest_starts(log_path, rank)
    return {start.rank: beat for start, beat in found if beat is not None}


def read_newest_starts(log_path: Path, rank: int | None = None) -> list[tuple[StartName, Beat | None]]:
    """Of each rank (of `rank` alone, if given) the newest start that has beaten, and the newest heartbeat that can be read now, which may
    be an older start's. Raises OSError."""
    reader = HeartbeatReader(PosixStore(), RunPaths(log_path).beats)
    return retry(lambda: [*reader.read(lambda newest: rank is None or newest.rank == rank)], errnos=FAILING)


def iteration_of_others(log_path: Path, rank: int) -> int:
    """In which iteration the nodes beside `rank` were last, of those that have not said that they went; 0 for none. Raises OSError."""
    beats = [beat for beat in read_beats(log_path).values() if beat.rank != rank and beat.state not in GONE]
    return max((beat.iteration for beat in beats), default=0)


def live_nodes(log_path: Path, watch_s: float, rank: int | None = None) -> list[Beat]:
    """The nodes (`rank` alone, if given) whose counter moves within `watch_s` seconds; for commands that are no node themselves.

    Returns as soon as every node is seen to be alive or gone. One whose heartbeat is listed and cannot be read may be alive: it may be
    about to be replaced. Raises OSError.
    """
    before, alive = _beats_of_newest_starts(log_path, rank), dict[int, Beat]()
    unknown = {node for node, beat in before.items() if beat is None or beat.state not in GONE}
    pause, deadline = threading.Event(), time.monotonic() + watch_s
    while unknown - alive.keys() and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        for node, beat in _beats_of_newest_starts(log_path, rank).items():
            if beat is None:
                continue
            if beat.state in GONE:
                unknown.discard(node)
            elif node in before and before[node] is None:
                # It can be read for the first time: whether it moves shows from here on.
                before[node] = beat
            elif beat != before.get(node):
                alive[node] = beat
    return [alive[node] for node in sorted(alive)]


def _beats_of_newest_starts(log_path: Path, rank: int | None) -> dict[int, Beat | None]:
    """None where the newest start's heartbeat cannot be read; what an older start wrote last says nothing of it. Raises OSError."""
    return {
        start.rank: beat if beat is not None and beat.incarnation == start.incarnation else None
        for start, beat in read_newest_starts(log_path, rank)
    }
