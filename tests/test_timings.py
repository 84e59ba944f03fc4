"""The arithmetic on journals' times, on journals written by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fsbarrier.rundir.journal import Event, parse
from fsbarrier.view.timings import OPEN, goodput, iteration_times, read_spans, row_times, together

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
NAMES = {0: "iteration_start", 2: "train_rollout", 13: "iteration_end"}


def line(
    rank: int,
    event: str,
    t: float,
    at: tuple[int, int, int],
    *,
    clock: str = "one",
    skew: float = 0.0,
    **more: Any,
) -> Event:
    """A line at `t`; `skew`: how far the writer's wall clock is ahead. Each clock has an origin of its own."""
    generation, iteration, phase = at
    raw = {
        "time": (BEGIN + timedelta(seconds=t + skew)).isoformat(),
        "mono_s": t + sum(map(ord, clock)),
        "run_id": "r",
        "node_rank": rank,
        "generation": generation,
        "iteration": iteration,
        "phase": phase,
        "phase_name": NAMES.get(phase, ""),
        "event": event,
        **more,
    }
    parsed = parse(raw)
    assert parsed is not None
    return parsed


def passage(
    rank: int, at: tuple[int, int, int], begin: float, done: float, end: float, **more: Any
) -> list[Event]:
    """A row gone through: entered, work done, released."""
    work = {"work_s": done - begin}
    return [
        line(rank, "phase_started", begin, at, **more),
        line(rank, "work_finished", done, at, **more, **work),
        line(rank, "phase_finished", end, at, **more, seconds=end - begin),
    ]


def test_coordination_runs_from_the_last_work_done_to_the_last_entry_of_the_next_row() -> None:
    node0 = [*passage(0, (1, 1, 0), 0.0, 0.0, 1.0), *passage(0, (1, 1, 2), 1.0, 5.0, 9.25)]
    node1 = [*passage(1, (1, 1, 0), 0.5, 0.5, 1.1), *passage(1, (1, 1, 2), 1.2, 9.0, 9.5)]
    first, second = row_times(read_spans([node0, node1]))
    assert (first.phase, first.last_rank) == (0, 1)
    assert first.seconds == pytest.approx(0.7)  # 0.5 (the last one in) to 1.2 (the last one in the next)
    assert first.coordination_s == pytest.approx(0.7)  # nobody had work: done when they entered
    assert second.last_rank == 1
    assert second.coordination_s == pytest.approx(0.5)  # the last row ends when its last member was released
    assert second.seconds == pytest.approx(8.3)


def test_rows_of_an_iteration_add_up_to_its_time() -> None:
    journal: list[Event] = []
    t = 100.0
    for iteration in (1, 2):
        for phase in (0, 2, 13):
            journal += passage(0, (1, iteration, phase), t, t + 0.3 * phase, t + 0.3 * phase + 0.01)
            t += 0.3 * phase + 0.01
    one, two = iteration_times(row_times(read_spans([journal])))
    assert one.complete and two.complete
    assert one.seconds == pytest.approx(4.53)
    assert one.coordination_s == pytest.approx(0.03)
    assert one.share == pytest.approx(0.03 / 4.53)
    assert sum(one.phases.values()) == pytest.approx(one.seconds)
    assert together([one, two]).phases[2, "train_rollout"] == pytest.approx(2 * 0.61)


def test_clocks_that_disagree_never_give_a_negative_time() -> None:
    near = passage(0, (1, 1, 0), 0.0, 0.0, 1.0, clock="near") + passage(
        0, (1, 1, 2), 1.0, 2.0, 3.0, clock="near"
    )
    far = [
        *passage(1, (1, 1, 0), 0.0, 0.9, 1.0, clock="far", skew=-40.0),
        *passage(1, (1, 1, 2), 1.0, 2.0, 3.0, clock="far", skew=-40.0),
    ]
    for row in row_times(read_spans([near, far])):
        assert row.seconds >= 0 and 0 <= (row.coordination_s or 0.0) <= row.seconds


def test_failed_work_is_known_and_an_unended_row_is_open() -> None:
    journal = [
        line(0, "phase_started", 0.0, (1, 1, 2)),
        line(0, "work_failed", 3.0, (1, 1, 2), work_s=3.0, error="no"),
    ]
    (span,) = read_spans([journal])
    assert span.failed and span.outcome == OPEN and span.seconds == pytest.approx(3.0)
    (iteration,) = iteration_times(row_times([span]), last_phase=13)
    assert not iteration.complete and iteration.coordination_s == 0


def test_goodput_is_the_time_of_what_counted_and_a_failure_costs_what_it_repeats() -> None:
    journal = [
        *passage(0, (1, 1, 0), 0.0, 0.0, 1.0),
        *passage(0, (1, 1, 2), 1.0, 10.9, 11.0),  # repeated by generation 2
        line(0, "phase_started", 11.0, (1, 1, 13)),
        line(0, "left_generation", 15.0, (1, 1, 13)),
        *passage(0, (2, 1, 2), 17.0, 26.9, 27.0),
        *passage(0, (2, 1, 13), 27.0, 27.0, 28.0),
    ]
    found = goodput(row_times(read_spans([journal])))
    assert found is not None
    assert found.share == pytest.approx(11 / 28)
    assert found.costs_s == pytest.approx({1: 0.0, 2: 10 + 4 + 2})
    assert goodput([]) is None
