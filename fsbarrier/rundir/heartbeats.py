"""Which nodes of a run are alive now, for commands that are no node themselves: counters watched for a little over a beat."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from fsbarrier.protocol.facts import Beat
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.store import PosixStore

LOOK_S = 0.05


def read_beats(log_path: Path, rank: int | None = None) -> dict[int, Beat]:
    """The last heartbeat of each rank's newest start (of `rank` alone, if given); unreadable ones are left out."""
    paths, store = RunPaths(log_path), PosixStore()
    prefix, beats = "node-" if rank is None else f"node-{rank:04d}.", dict[int, Beat]()
    for name in store.names(paths.beats):
        beat = store.read(paths.beats / name, Beat) if name.startswith(prefix) else None
        if beat is not None and (beat.rank not in beats or beat.incarnation > beats[beat.rank].incarnation):
            beats[beat.rank] = beat
    return beats


def live_nodes(log_path: Path, watch_s: float) -> list[Beat]:
    """The nodes whose counter moves within `watch_s` seconds; returns as soon as every node is seen to be alive or gone."""
    first = read_beats(log_path)
    candidates = {rank for rank, beat in first.items() if beat.state not in GONE}
    alive: dict[int, Beat] = {}
    pause, deadline = threading.Event(), time.monotonic() + watch_s
    while candidates - alive.keys() and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        for rank, beat in read_beats(log_path).items():
            old = first.get(rank)
            if old is None or (beat.incarnation, beat.counter) != (old.incarnation, old.counter):
                if beat.state in GONE:
                    candidates.discard(rank)
                else:
                    alive[rank] = beat
    return [alive[rank] for rank in sorted(alive)]
