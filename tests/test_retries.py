"""The one way to wait for a mount that fails for a moment or shows new files late, and how long a node holds out."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsbarrier.coordination.life import NodeLife
from fsbarrier.coordination.polling import Pace
from fsbarrier.coordination.run_rules import make_rules, poll_intervals
from fsbarrier.program import Phase, Program
from fsbarrier.settings.sections import CoordinationSettings, Settings
from fsbarrier.store.retry import Backoff, fails, fails_or_hides, patiently


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


# --- a node's looks -------------------------------------------------------------------------------------------------------------

OUTAGE_S = 10.0


class FailingMount:
    """A node's loop on a mount that fails from time to time."""

    def __init__(self, root: Path) -> None:
        self.fails = False
        self.observer = SimpleNamespace(
            paths=SimpleNamespace(root=root),
            intervals=SimpleNamespace(outage_s=OUTAGE_S),
            schedule=SimpleNamespace(beats_due=0.0),
        )
        self.node, self.store = SimpleNamespace(rank=2), None
        self.exit: Any = None
        self.write_event = lambda event, node, fields: None

    def tick(self, now: float) -> bool:
        if self.fails:
            raise OSError(5, "the mount fails")
        return True


@pytest.fixture
def mount(tmp_path: Path) -> FailingMount:
    return FailingMount(tmp_path)


def life(mount: FailingMount) -> NodeLife:
    return NodeLife(cast(Any, mount), lambda: None, 2.0, Backoff(0.001, 0.05), 0.0)


def test_a_failing_mount_is_tried_again_for_the_time_of_an_outage(mount: FailingMount) -> None:
    node, mount.fails = life(mount), True
    node.look(100.0)
    node.look(100.0 + OUTAGE_S - 0.1)
    assert mount.exit is None
    node.look(100.0 + OUTAGE_S)
    assert mount.exit.code == 3 and re.match(r"node 2: .* has failed for 10 s", mount.exit.reason)


def test_errors_with_good_looks_between_them_are_no_outage(mount: FailingMount) -> None:
    node = life(mount)
    for now in range(0, 100, 6):
        for mount.fails in (True, False):
            node.look(now + 1.0 - mount.fails)
            assert node.failing is mount.fails
    assert mount.exit is None


def test_looks_are_quick_again_as_soon_as_something_has_happened(mount: FailingMount) -> None:
    """A pause is a part of this wait, however long the wait before took."""
    mount.observer.schedule.beats_due = float("inf")
    pace, pauses = Pace(cast(Any, mount)), Backoff(0.001, 0.05)
    assert pace.next_pause(0.0, pauses, busy=True) == 0.001
    assert pace.next_pause(100.0, pauses, busy=False) == 1.0
    assert pace.next_pause(101.0, pauses, busy=True) == 0.001
    assert pace.next_pause(101.01, pauses, busy=False) < 0.01


def test_the_times_of_a_node_are_those_of_its_settings() -> None:
    coordination = CoordinationSettings(beat_s=3.0, dead_s=20.0)
    settings = Settings(coordination=coordination, num_nodes=2)
    limits = make_rules(settings, Program("ping", (Phase(0, "only"),)), 0).limits
    assert (limits.suspect_s, limits.dead_s, limits.stagger_s) == (12.0, 20.0, 6.0)
    intervals = poll_intervals(settings)
    # A longer time without a look is one and a half beats.
    assert (intervals.poll_gap_s, intervals.outage_s) == (4.5, 240.0)
