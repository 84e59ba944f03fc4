"""What the report says cost most time, and how a phase's time falls into parts."""

from __future__ import annotations

import pytest

from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.view.timings import CUT_SHORT, PASSED, Span, row_times
from fsbarrier.view.wastes import parts_by_iteration, parts_by_phase, wastes

NAMES = {2: "train_rollout", 10: "update"}


def span(
    rank: int,
    phase: int,
    time: PhaseTime,
    *,
    iteration: int = 1,
    outcome: str = PASSED,
    generation: int = 1,
    works_last: bool = False,
) -> Span:
    """A member's row that began with all others'. It waited at the end, or before it worked (`works_last`)."""
    begin = 100.0 * iteration + 10.0 * phase
    where = rank, generation, iteration, phase, NAMES[phase], "clock"
    done_s = begin + time.seconds - (0.0 if works_last else time.wait_s)
    return Span(*where, begin, begin, begin + time.seconds, done_s, time, outcome)


FAST, SLOW = PhaseTime(work_s=2, wait_s=6), PhaseTime(work_s=7, wait_s=1)

CASES = {
    "nothing was read": ([], []),
    "all time was work": ([span(0, 2, PhaseTime(work_s=9)), span(1, 2, PhaseTime(work_s=9))], []),
    "one waits for the other, and both see late that both are done": (
        [span(0, 10, SLOW), span(2, 10, FAST)],
        [
            "62 % of node 2's time: waiting for node 0's update",
            "12 % of the time of nodes 0, 2: coordination: detecting that all nodes are done",
        ],
    ),
    "what costs all nodes time is said once": (
        [span(rank, 10, PhaseTime(start_s=3, work_s=1)) for rank in range(3)],
        ["75 % of the time of nodes 0, 1, 2: starting programs and engines for update"],
    ),
    "load and save": (
        [span(0, 10, PhaseTime(load_s=2, work_s=5, save_s=3))],
        ["30 % of node 0's time: saving the results of update", "20 % of node 0's time: loading for update"],
    ),
    "a leader that works last has waited for the others before": (
        [span(0, 2, PhaseTime(work_s=4, wait_s=5), works_last=True), span(1, 2, PhaseTime(work_s=3))],
        ["56 % of node 0's time: waiting for the other nodes' train_rollout"],
    ),
    "the three largest, the largest first": (
        [
            span(0, 2, PhaseTime(start_s=1, load_s=2, work_s=9, save_s=3)),
            span(0, 10, PhaseTime(start_s=4, work_s=9)),
        ],
        [
            "14 % of node 0's time: starting programs and engines for update",
            "11 % of node 0's time: saving the results of train_rollout",
            "7.1 % of node 0's time: loading for train_rollout",
        ],
    ),
    "cut short": (
        [
            span(0, 10, PhaseTime(work_s=5, wait_s=15), outcome=CUT_SHORT),
            span(0, 10, PhaseTime(work_s=20), generation=2),
        ],
        ["50 % of node 0's time: update, which was aborted and restarted"],
    ),
}


@pytest.mark.parametrize(("spans", "sentences"), CASES.values(), ids=CASES)
def test_what_cost_most_is_said_in_words(spans: list[Span], sentences: list[str]) -> None:
    assert [waste.sentence() for waste in wastes(spans, row_times(spans))] == sentences


@pytest.mark.parametrize(
    ("worked_s", "result", "time"),
    [
        (5.0, {}, PhaseTime(work_s=5)),
        (5.0, {"start_s": 1, "load_s": 0.5, "save_s": 2}, PhaseTime(1, 0.5, 1.5, 2)),
        (5.0, {"engine_s": 2, "start_s": 1}, PhaseTime(3, 0, 2)),
        # What a user's own program says of itself may be anything.
        (5.0, {"start_s": 9, "load_s": 9}, PhaseTime(5)),
        (5.0, {"start_s": -3, "load_s": "much", "save_s": float("nan"), "work_s": 99}, PhaseTime(work_s=5)),
    ],
)
def test_the_parts_of_some_work_are_what_its_result_says(
    worked_s: float, result: dict[str, object], time: PhaseTime
) -> None:
    assert PhaseTime.of_work(worked_s, result) == time
    assert time.within(8.0) == PhaseTime(time.start_s, time.load_s, time.work_s, time.save_s, 3.0)
    assert time.within(1.0).wait_s == 0.0
    assert PhaseTime.read(time.fields()) == time and 0.0 not in time.fields().values()


def test_parts_are_means_over_nodes_and_over_iterations() -> None:
    spans = [
        span(0, 10, PhaseTime(work_s=4)),
        span(1, 10, PhaseTime(work_s=2, wait_s=2)),
        span(0, 10, PhaseTime(work_s=7), outcome=CUT_SHORT),
        span(0, 10, PhaseTime(work_s=1), iteration=2),
    ]
    means = parts_by_iteration(spans)
    assert means == {(1, 10): PhaseTime(work_s=3, wait_s=1), (2, 10): PhaseTime(work_s=1)}
    assert parts_by_phase(means, {1, 2}) == {10: PhaseTime(work_s=2, wait_s=0.5)}
    assert parts_by_phase(means, {2}) == {10: PhaseTime(work_s=1)} and parts_by_phase({}, set()) == {}
