"""Retries operations on a mount that fails for a moment or shows new files late. The nodes' loop has its own retries (life.py)."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Growing pauses between polls: short at first, because most waits are short, then longer, to make long waits cheap."""

    first_s: float
    most_s: float
    factor: float = 1.5

    def after(self, pause_s: float) -> float:
        """The pause after one of `pause_s`."""
        return min(pause_s * self.factor, self.most_s)

    def __iter__(self) -> Iterator[float]:
        """The infinite sequence of pauses of one wait."""
        pause_s = self.first_s
        while True:
            yield pause_s
            pause_s = self.after(pause_s)


#: errors of a mount that may be transient
FAILING = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENXIO})
#: how long to retry on a failing mount if a person or a program can repeat the whole operation
PASSING_S = 1.5
#: How long a mount may hide a file made by another node: twice the default negative cache lifetime of an NFS client.
HIDDEN_S = 60.0
PAUSES = Backoff(0.02, 0.5, factor=2.0)
#: the part of the time between two failures that counts at most as time in which the mount failed
COUNTED_S = 10.0


def fails(error: Exception) -> bool:
    """Whether an error shows that the mount fails, perhaps only for a moment."""
    return isinstance(error, OSError) and error.errno in FAILING


def fails_or_hides(error: Exception) -> bool:
    """Whether the mount fails, or does not show a file yet. Only for directories that are known to exist.

    Example: node 1 created coordination/ a second ago. Until this mount refreshes its cache, the directory can neither be created (EEXIST)
    nor entered (ENOENT).
    """
    return isinstance(error, OSError) and error.errno in FAILING | {errno.ENOENT}


#: errors of a filesystem that can be read but not written: no room, or no permission
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
UNWRITABLE = NO_ROOM | {errno.EROFS, errno.EACCES, errno.EPERM}


def is_of_the_mount(error: BaseException | None) -> bool:
    """Whether a filesystem failed or is full, which may pass. Sockets have some of these error codes too, but no file name."""
    if not isinstance(error, OSError):
        return False
    return error.errno in (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS) or (
        error.errno in FAILING and error.filename is not None
    )


def patiently(
    operation: Callable[[], T],
    within_s: float = PASSING_S,
    *,
    passes: Callable[[Exception], bool] = fails,
    cancel: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Repeat `operation` while it raises an error for which `passes` is true, for `within_s` after the first one. Returns its result.

    At most `COUNTED_S` of the time between two failures counts, since this process may have been stopped, or the operation may have run
    well for an hour before it failed. Raises the last failure, also when `cancel` is set meanwhile.
    """
    idle = cancel if cancel is not None else threading.Event()
    pauses, until, failed_at = iter(PAUSES), 0.0, None
    while True:
        try:
            return operation()
        except Exception as error:
            now = clock()
            until = now + within_s if failed_at is None else until + max(0.0, now - failed_at - COUNTED_S)
            failed_at = now
            # The last pause is shortened, so that the last repetition happens exactly when the time is up.
            if now >= until or not passes(error) or idle.wait(min(next(pauses), until - now)):
                raise
