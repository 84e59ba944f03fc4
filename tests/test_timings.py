"""The arithmetic on journals' times, on journals written by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fsbarrier.rundir.journal import Event, number, parse
from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.view.timings import CUT_SHORT, OPEN, PASSED, iteration_times, read_spans, row_times, together

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
    parsed = parse(raw, clock)
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
    assert (first.phase, first.last_rank, first.exact) == (0, 1, True)
    assert first.seconds == pytest.approx(0.7)  # 0.5 (the last one in) to 1.2 (the last one in the next)
    assert first.coordination_s == pytest.approx(0.7)  # nobody had work: done when they entered
    assert second.last_rank == 1
    assert second.coordination_s == pytest.approx(0.5)  # the last row ends when its last member was released
    assert second.seconds == pytest.approx(8.3)
    assert second.work_s == pytest.approx(7.8)


def test_a_rows_parts_are_read_from_its_end_and_the_rest_was_waiting() -> None:
    parts = {"seconds": 9.0, "start_s": 2.0, "load_s": 0.5, "work_s": 3.0, "save_s": 0.5, "wait_s": 3.0}
    at = 1, 1, 10
    (whole,) = read_spans([[line(0, "phase_started", 1.0, at), line(0, "phase_finished", 10.0, at, **parts)]])
    assert whole.time == PhaseTime(2.0, 0.5, 3.0, 0.5, 3.0) and whole.done_s == whole.began_s + 6.0
    # A leader that waited before its last piece of work.
    told = {**parts, "waited_s": 0.25}
    (leader,) = read_spans([[line(0, "phase_started", 1.0, at), line(0, "phase_finished", 10.0, at, **told)]])
    assert leader.time == whole.time and leader.done_s == whole.began_s + 8.75
    # A row with work of which nothing was waited.
    busy = {"seconds": 9.0, "work_s": 9.0}
    (last,) = read_spans([[line(0, "phase_started", 1.0, at), line(0, "phase_finished", 10.0, at, **busy)]])
    assert last.time == PhaseTime(work_s=9.0) and last.done_s == last.ended_s
    # A row without work, and a row as earlier versions wrote it.
    idle = [line(0, "phase_started", 1.0, at, waits=True), line(0, "phase_finished", 10.0, at, seconds=9.0)]
    assert read_spans([idle])[0].time == PhaseTime(wait_s=9.0)
    assert read_spans([passage(0, at, 1.0, 7.0, 10.0)])[0].time == PhaseTime(work_s=6.0, wait_s=3.0)


def test_work_that_was_told_late_was_done_before() -> None:
    at = 1, 1, 10
    late = [
        line(0, "phase_started", 1.0, at),
        line(0, "work_finished", 9.0, at, start_s=1.0, work_s=2.0, waited_s=5.0),
        line(0, "generation_started", 20.0, (2, 1, 10)),
    ]
    (span,) = read_spans([late])
    assert (span.outcome, span.time) == (CUT_SHORT, PhaseTime(start_s=1.0, work_s=2.0))
    assert span.done_s == pytest.approx(span.began_s + 3.0)


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
    assert sum(one.work.values()) + one.coordination_s == pytest.approx(one.seconds)
    assert together([one, two]).phases[2, "train_rollout"] == pytest.approx(2 * 0.61)


def test_hosts_are_compared_by_their_wall_clocks_and_said_to_be() -> None:
    near = passage(0, (1, 1, 0), 0.0, 0.0, 1.0, clock="near") + passage(
        0, (1, 1, 2), 1.0, 2.0, 3.0, clock="near"
    )
    far = passage(1, (1, 1, 0), 0.0, 0.0, 1.5, clock="far") + passage(
        1, (1, 1, 2), 1.5, 2.0, 3.0, clock="far"
    )
    first = row_times(read_spans([near, far]))[0]
    assert not first.exact
    assert first.coordination_s == pytest.approx(1.5)


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


def test_a_row_that_a_new_generation_cuts_short_is_no_coordination() -> None:
    survivor = [
        line(0, "phase_started", 0.0, (1, 1, 2)),
        line(0, "work_finished", 4.0, (1, 1, 2), work_s=4.0),
        line(0, "generation_started", 20.0, (2, 1, 2), number=2),
        *passage(0, (2, 1, 2), 20.0, 23.0, 23.1),
        *passage(0, (2, 1, 13), 23.1, 23.1, 23.2),
    ]
    victim = [line(1, "phase_started", 0.0, (1, 1, 2))]
    spans = read_spans([survivor, victim])
    assert {(s.node_rank, s.generation, s.outcome) for s in spans} == {
        *((0, 1, CUT_SHORT), (0, 2, PASSED), (1, 1, OPEN)),
    }
    (iteration,) = iteration_times(row_times(spans))
    assert iteration.cut_short_s == pytest.approx(20.0)
    assert iteration.coordination_s == pytest.approx(0.2)
    assert iteration.seconds == pytest.approx(23.2)
    assert iteration.complete


def test_a_night_between_two_sessions_is_not_counted() -> None:
    before = [line(0, "phase_started", 0.0, (1, 1, 2)), line(0, "node_ended", 3.0, (1, 1, 2), state="left")]
    after = [
        *passage(0, (2, 1, 2), 40_000.0, 40_004.0, 40_004.1),
        *passage(0, (2, 1, 13), 40_004.1, 40_004.1, 40_004.2),
    ]
    (iteration,) = iteration_times(row_times(read_spans([before, after])))
    assert iteration.seconds == pytest.approx(7.2)


def test_failed_work_is_known_and_an_unended_row_is_open() -> None:
    journal = [
        line(0, "phase_started", 0.0, (1, 1, 2)),
        line(0, "work_failed", 3.0, (1, 1, 2), work_s=3.0, error="no"),
    ]
    (span,) = read_spans([journal])
    assert span.failed and span.outcome == OPEN and span.seconds == pytest.approx(3.0)
    (iteration,) = iteration_times(row_times([span]), last_phase=13)
    assert not iteration.complete and iteration.coordination_s == 0


def test_rows_that_one_member_never_reported_still_count_once_another_passed() -> None:
    node0 = [*passage(0, (1, 1, 0), 0.0, 1.0, 1.5), *passage(0, (1, 1, 13), 1.5, 1.5, 1.6)]
    killed_in_it = [line(1, "phase_started", 0.1, (1, 1, 0))]
    first = row_times(read_spans([node0, killed_in_it]))[0]
    assert first.coordination_s == pytest.approx(0.5) and not first.cut_short


def test_no_events_give_no_times() -> None:
    assert row_times([]) == [] and iteration_times([]) == [] and together([]).phases == {}


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        "x",
        {},
        {"event": "phase_started"},
        {"event": "e", "time": "yesterday", "mono_s": 1.0},
        {"event": "e", "time": "2026-03-01T00:00:00", "mono_s": "1"},
        {"event": "e", "time": "2026-03-01T00:00:00", "mono_s": float("nan"), "node_rank": 0},
        {
            "event": "e",
            "time": "2026-03-01T00:00:00",
            "mono_s": 1,
            "node_rank": True,
            "generation": 1,
            "iteration": 1,
            "phase": 1,
        },
        {
            "event": "e",
            "time": "2026-03-01T00:00:00",
            "mono_s": 1,
            "node_rank": -1,
            "generation": 1,
            "iteration": 1,
            "phase": 1,
        },
        {
            "event": 3,
            "time": "2026-03-01T00:00:00",
            "mono_s": 1,
            "node_rank": 0,
            "generation": 1,
            "iteration": 1,
            "phase": 1,
        },
    ],
)
def test_what_is_no_event_is_none(raw: object) -> None:
    assert parse(raw) is None


def test_numbers_are_finite_or_none() -> None:
    for value in (float("inf"), float("nan"), "3", None, True, [1], 10**400):
        assert number({"x": value}, "x") is None
    assert number({"x": 3}, "x") == 3.0
