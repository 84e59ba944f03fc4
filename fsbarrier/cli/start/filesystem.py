"""A short `fsbarrier doctor` at each start: rejects an unsuitable filesystem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fsbarrier.doctor import examine
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.protocol.timing import BEAT_S, DEAD_S
from fsbarrier.store.retry import fails, patiently

#: Above this number of nodes the timeouts grow with it, so that the heartbeats do not increase the load on the file server.
MANY_NODES = 160
LIMITS = {
    "coordination.beat_s": BEAT_S,
    "coordination.dead_s": DEAD_S,
}


def admit(log_path: Path, *, write: bool) -> None:
    """A quick check of the filesystem under `log_path`, which need not exist yet. `write`: include write tests.

    Raises StoreError if the filesystem fails or is unsuitable, UsageError without write permission.
    """
    try:
        report = patiently(lambda: examine.short(log_path, write=write))
    except OSError as error:
        if fails(error):
            raise StoreError(f"--log-path {log_path}: {error.strerror}") from None
        raise UsageError(f"--log-path {log_path}: not writable: {error.strerror or error}") from None
    if report.refused:
        found = report.refused[0]
        advice = f"; {found.advice}" if found.advice else ""
        raise StoreError(
            f"--log-path {log_path}: its filesystem cannot support a run: {found.finding}{advice} (details: fsbarrier doctor)"
        )


def limits(given: Mapping[str, object], num_nodes: int) -> dict[str, float]:
    """Longer timeouts for many nodes; {} if the user set any of them."""
    crowd = num_nodes / MANY_NODES
    if crowd <= 1 or any(name in given for name in LIMITS):
        return {}
    return {name: round(seconds * crowd, 1) for name, seconds in LIMITS.items()}
