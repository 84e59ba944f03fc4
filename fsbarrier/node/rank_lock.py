"""One daemon a node rank: refuses a second one before it disturbs the first."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Beat
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.heartbeats import read_beats
from fsbarrier.rundir.paths import RunPaths

WATCHED_BEATS = 2.5


@contextmanager
def hold_rank(paths: RunPaths, rank: int, beat_s: float) -> Iterator[None]:
    """While this lasts, this process is the only daemon of `rank` on this host. Raises UsageError if the rank is taken.

    On this host a lock decides. A daemon on another host shows itself by its heartbeats, which are watched for a little
    over two beats; two that start at the same instant are told apart later, by their incarnations (exit code 6).
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
        if (
            beat
            and beat.host != socket.gethostname()
            and beat.state not in GONE
            and _moves(paths, beat, beat_s)
        ):
            raise UsageError(
                f"node {rank} of {paths.root} is already running on {beat.host}, process {beat.pid}; "
                "give this node another rank, or end that one first"
            )
        yield
    finally:
        lock.release()


def _moves(paths: RunPaths, old: Beat, beat_s: float) -> bool:
    deadline = time.monotonic() + WATCHED_BEATS * beat_s
    pause = threading.Event()
    while time.monotonic() < deadline:
        new = read_beats(paths.root, old.rank).get(old.rank)
        if new is not None and (new.incarnation, new.counter) != (old.incarnation, old.counter):
            return new.state not in GONE
        pause.wait(beat_s / 10)
    return False
