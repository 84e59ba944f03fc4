"""One daemon a node rank: refuses a second one before it disturbs the first."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from fsbarrier.errors import UsageError
from fsbarrier.host.identity import host_name
from fsbarrier.rundir.heartbeats import live_nodes, read_beats
from fsbarrier.rundir.paths import RunPaths

# In two beats a living daemon shows that it beats; half a beat more allows for a late one.
WATCHED_BEATS = 2.5


@contextmanager
def hold_rank(paths: RunPaths, rank: int, beat_s: float) -> Iterator[None]:
    """While this lasts, this process is the only daemon of `rank` on this host. Raises UsageError if the rank is taken.

    On this host a lock decides. To find a daemon on another host, this watches its heartbeats for a little over two beats. If two
    start at the same instant on two hosts, the one with the lower incarnation ends later, with exit code 6.
    """
    name = hashlib.sha256(f"{paths.root.resolve()}:{rank}".encode()).hexdigest()[:16]
    lock_file = Path(tempfile.gettempdir()) / f"fsbarrier-{os.getuid()}-{name}.lock"
    lock = filelock.FileLock(lock_file, mode=0o600)
    beat = read_beats(paths.root, rank).get(rank)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        who = f"process {beat.pid}" if beat else "another process"
        raise UsageError(
            f"node {rank} of {paths.root} is already running on this host ({who}); end it first"
        ) from None
    try:
        elsewhere = beat is not None and beat.host != host_name()
        if elsewhere and (alive := live_nodes(paths.root, WATCHED_BEATS * beat_s, rank)):
            raise UsageError(
                f"node {rank} of {paths.root} is already running on {alive[0].host}, process {alive[0].pid}; "
                "give this node another rank, or end that one first"
            )
        yield
    finally:
        lock.release()
