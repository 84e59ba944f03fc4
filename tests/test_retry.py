"""Trying again: pauses that grow, errors that pass, and those that do not."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable

import pytest

from fsbarrier.store.retry import Backoff, retry, until_seen


def failing(times: int, number: int = errno.EIO) -> tuple[Callable[[], str], list[int]]:
    """An operation that fails so many times before it works, and a list that grows with each try."""
    tries: list[int] = []

    def operation() -> str:
        tries.append(number)
        if len(tries) <= times:
            raise OSError(number, "not now")
        return "done"

    return operation, tries


def test_pauses_grow_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 4.0)
    assert list(itertools.islice(backoff, 5)) == [1.0, 1.5, 2.25, 3.375, 4.0]
    assert backoff.after(4.0) == 4.0


def test_an_error_that_passes_is_not_noticed() -> None:
    operation, tries = failing(3)
    assert retry(operation, within_s=5.0) == "done" and len(tries) == 4


def test_an_error_that_stays_is_raised_when_the_time_is_up() -> None:
    operation, tries = failing(10**6)
    began = time.monotonic()
    with pytest.raises(OSError, match="not now"):
        retry(operation, within_s=0.1)
    assert time.monotonic() - began >= 0.1 and len(tries) >= 2


def test_what_cannot_pass_is_raised_at_once() -> None:
    operation, tries = failing(1, errno.EACCES)
    with pytest.raises(OSError):
        retry(operation, within_s=60.0, errnos={errno.EIO})
    assert len(tries) == 1


def test_whoever_is_called_off_does_not_wait() -> None:
    operation, tries = failing(10**6)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(OSError):
        retry(operation, within_s=60.0, cancel=cancel)
    assert len(tries) == 1


def test_until_seen_also_waits_for_what_is_not_there_yet() -> None:
    """A directory that another node made shows up late, while an error that stays for so long ends the wait."""
    operation, tries = failing(5, errno.ENOENT)
    assert until_seen(operation) == "done" and len(tries) == 6
    operation, _ = failing(10**6, errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        until_seen(operation, within_s=0.1)
    operation, tries = failing(1, errno.EACCES)
    with pytest.raises(PermissionError):
        until_seen(operation)
    assert len(tries) == 1
