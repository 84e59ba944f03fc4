"""Retries for transient filesystem errors and for files that are not visible yet."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Container, Iterator
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
#: how long to retry on a failing filesystem, and the pauses between retries
PASSING_S = 1.5
#: How long a mount may hide a file made by another node: twice the default negative cache lifetime of an NFS client.
HIDDEN_S = 60.0
PAUSES = Backoff(0.02, 0.5, factor=2.0)


def retry(
    operation: Callable[[], T],
    *,
    within_s: float = PASSING_S,
    errnos: Container[int] | None = None,
    cancel: threading.Event | None = None,
    passing: tuple[type[Exception], ...] = (OSError,),
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call `operation`, and retry while it raises one of `passing`, for `within_s` after its first failure.

    Raises the last failure, and immediately an OSError whose errno is not in `errnos` (None: retry every error). When `cancel` is set
    during a pause, raises the failure before it.
    """
    idle = cancel if cancel is not None else threading.Event()
    pauses, failing_since = iter(PAUSES), None
    while True:
        try:
            return operation()
        except passing as error:
            now = clock()
            failing_since = now if failing_since is None else failing_since
            left_s = failing_since + within_s - now
            stays = isinstance(error, OSError) and errnos is not None and error.errno not in errnos
            if left_s <= 0 or stays:
                raise
            # The last pause is shortened, so that the last retry happens exactly when the time is up.
            if idle.wait(min(next(pauses), left_s)):
                raise


def until_seen(operation: Callable[[], T], within_s: float = HIDDEN_S) -> T:
    """Call `operation` on directories that exist, although this mount may not show them yet.

    Example: node 1 created coordination/ a second ago. Until this mount refreshes its cache, the directory can neither be created (EEXIST)
    nor entered (ENOENT). Transient errors are retried as in `retry`. Raises OSError.
    """
    return retry(lambda: retry(operation, errnos=FAILING), within_s=within_s, errnos={errno.ENOENT})
