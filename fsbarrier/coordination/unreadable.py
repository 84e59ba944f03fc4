"""Records that are listed and cannot be read: never taken for absent, and timed until the node gives up."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.protocol.facts import R
from fsbarrier.protocol.state import Unreadable
from fsbarrier.rundir.record_store import Store


@dataclass
class ReadFailures:
    """Tells since when a record cannot be read.

    Only time in which this node looked counts. Example: a read is garbled once, and then the process is stopped for 20 s. That is one
    failed read, and not 20 s of them. `blind_s`: two looks further apart do not count as one time.
    """

    store: Store
    blind_s: float
    _failed_at: float = float("-inf")

    def note(self, path: Path, cls: type[R], now: float, before: Unreadable | None) -> Unreadable:
        """A read of `path` failed. `before`: the last failure of the kind, maybe of the same record."""
        blind = now - self._failed_at >= self.blind_s
        since = before.since if before is not None and before.path == str(path) and not blind else now
        self._failed_at = now
        return Unreadable(str(path), self.store.fault(path, cls), since)


def must_read(store: Store, path: Path, cls: type[R]) -> R:
    """A record that is known to be there. Raises OSError if it cannot be read now: treating it as absent would lose it."""
    record = store.read(path, cls)
    if record is None:
        why = store.fault(path, cls).why
        raise OSError(errno.EAGAIN, f"this record cannot be read ({why}); restore it", str(path))
    return record
