"""How long a node holds out while its filesystem fails, and what its settings make of that."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsbarrier.coordination.life import NodeLife
from fsbarrier.coordination.polling import Pace
from fsbarrier.coordination.run_rules import make_rules, poll_intervals
from fsbarrier.program import Phase, Program
from fsbarrier.settings.sections import CoordinationSettings, Settings
from fsbarrier.store.retry import Backoff

OUTAGE_S = 10.0


class Mount:
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
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


def life(mount: Mount) -> NodeLife:
    return NodeLife(cast(Any, mount), lambda: None, 2.0, Backoff(0.001, 0.05), 0.0)


def test_a_failing_mount_is_tried_again_for_the_time_of_an_outage(mount: Mount) -> None:
    node, mount.fails = life(mount), True
    node.look(100.0)
    node.look(100.0 + OUTAGE_S - 0.1)
    assert mount.exit is None
    node.look(100.0 + OUTAGE_S)
    assert mount.exit.code == 3 and re.match(r"node 2: .* has failed for 10 s", mount.exit.reason)


def test_errors_with_good_looks_between_them_are_no_outage(mount: Mount) -> None:
    node = life(mount)
    for now in range(0, 100, 6):
        for mount.fails in (True, False):
            node.look(now + 1.0 - mount.fails)
            assert node.failing is mount.fails
    assert mount.exit is None


def test_looks_are_quick_again_as_soon_as_something_has_happened(mount: Mount) -> None:
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
