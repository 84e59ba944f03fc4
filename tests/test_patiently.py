"""The one way to wait for a mount that fails for a moment, or shows new files late."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import pytest

from fsbarrier.store.retry import fails, fails_or_hides, patiently


class Mount(threading.Event):
    """Its operation takes `takes_s` and fails until `fails_until`; a wait advances the clock."""

    def __init__(self, code: int, fails_until: float, takes_s: float = 0.0) -> None:
        super().__init__()
        self.now, self.tries = 0.0, 0
        self._code, self._fails_until, self._takes_s = code, fails_until, takes_s

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.is_set()

    def operation(self) -> float:
        self.tries += 1
        self.now += self._takes_s
        if self.now < self._fails_until:
            raise OSError(self._code, os.strerror(self._code))
        return self.now


@pytest.mark.parametrize(
    ("code", "passes", "lasts_s"),
    [(errno.EIO, fails, 9.0), (errno.ESTALE, fails_or_hides, 9.0), (errno.ENOENT, fails_or_hides, 9.0)],
)
def test_what_passes_in_time_is_waited_for(
    code: int, passes: Callable[[Exception], bool], lasts_s: float
) -> None:
    mount = Mount(code, lasts_s)
    assert (
        lasts_s
        <= patiently(mount.operation, 10.0, passes=passes, cancel=mount, clock=lambda: mount.now)
        < 9.5
    )
    # The last repetition happens exactly when the time is up.
    late = Mount(code, 10.1)
    with pytest.raises(OSError, match=os.strerror(code)):
        patiently(late.operation, 10.0, passes=passes, cancel=late, clock=lambda: late.now)
    assert late.now == pytest.approx(10.0)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_what_does_not_pass_is_raised_at_once(code: int) -> None:
    mount = Mount(code, 60.0)
    with pytest.raises(OSError, match=os.strerror(code)):
        patiently(mount.operation, 10.0, cancel=mount, clock=lambda: mount.now)
    assert mount.tries == 1


@pytest.mark.parametrize(
    ("takes_s", "lasts_s", "within_s"),
    [
        pytest.param(1800.0, 7000.0, 120.0, id="a program of half an hour that meets three outages"),
        pytest.param(14.0, 50.0, 25.0, id="a process that is stopped while its operation fails"),
    ],
)
def test_long_operations_are_repeated_several_times(takes_s: float, lasts_s: float, within_s: float) -> None:
    mount = Mount(errno.EIO, lasts_s, takes_s)
    assert patiently(mount.operation, within_s, cancel=mount, clock=lambda: mount.now) > lasts_s


def test_operations_that_hang_before_they_fail_are_given_up() -> None:
    mount = Mount(errno.EIO, float("inf"), takes_s=200.0)
    with pytest.raises(OSError, match="Input/output"):
        patiently(mount.operation, 120.0, cancel=mount, clock=lambda: mount.now)
    assert mount.tries == 13


def test_whoever_is_cancelled_waits_no_more() -> None:
    mount = Mount(errno.EIO, 60.0)
    mount.set()
    with pytest.raises(OSError, match="Input/output"):
        patiently(mount.operation, 10.0, cancel=mount, clock=lambda: mount.now)
    assert mount.tries == 1
