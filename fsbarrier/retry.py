"""Trying again: what is not there yet, or what a shared filesystem refuses for a moment, may be there at the next look."""

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
    """Pauses between looks: short ones first, since most waits are short, then longer ones, so that a long wait costs little."""

    first_s: float
    most_s: float
    factor: float = 1.5

    def after(self, pause_s: float) -> float:
        """The pause that follows one of `pause_s`."""
        return min(pause_s * self.factor, self.most_s)

    def __iter__(self) -> Iterator[float]:
        """All pauses of one wait, without end."""
        pause_s = self.first_s
        while True:
            yield pause_s
            pause_s = self.after(pause_s)


#: errors of a mount that is there but fails; a moment later it may work
FAILING = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENXIO})
#: how long a failing filesystem is tried again, and the pauses between two tries
PASSING_S = 1.5
#: For so long a mount may hide what another node made: twice as long as an NFS client remembers by default that a name was absent.
HIDDEN_S = 60.0
PAUSES = Backoff(0.02, 0.5, factor=2.0)


def retry(
    operation: Callable[[], T],
    *,
    within_s: float = PASSING_S,
    errnos: Container[int] | None = None,
    cancel: threading.Event | None = None,
    passing: tuple[type[Exception], ...] = (OSError,),
) -> T:
    """What `operation` gives. While it raises one of `passing` it is tried again, for `within_s` from its first failure on.

    Raises the last failure, and at once an OSError whose errno is not in `errnos` (None: every error may pass).
    `cancel` ends the pauses: then the failure before it is raised, too.
    """
    idle = cancel if cancel is not None else threading.Event()
    pauses, failing_since = iter(PAUSES), None
    while True:
        try:
            return operation()
        except passing as error:
            now = time.monotonic()
            failing_since = now if failing_since is None else failing_since
            left_s = failing_since + within_s - now
            stays = isinstance(error, OSError) and errnos is not None and error.errno not in errnos
            if left_s <= 0 or stays:
                raise
            # Cut the last pause short, so that one more try comes when the time is up.
            if idle.wait(min(next(pauses), left_s)):
                raise


def until_seen(operation: Callable[[], T], within_s: float = HIDDEN_S) -> T:
    """What `operation` gives in directories that are there, although this mount may not show them yet.

    Example: node 1 made coordination/ a second ago. Here it can neither be made (EEXIST) nor entered (ENOENT) until this mount looks
    again. Errors that pass are tried again as `retry` does. Raises OSError.
    """
    return retry(lambda: retry(operation, errnos=FAILING), within_s=within_s, errnos={errno.ENOENT})
