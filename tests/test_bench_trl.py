"""scripts/bench_trl.py: how an iteration is split, what is printed of several races, and whose memory counts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cluster import REPO

from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.view.timings import NO_TIME, PASSED, Span

sys.path.insert(0, str(REPO / "scripts"))
import bench_trl


def span(iteration: int, name: str, seconds: float, time: PhaseTime = NO_TIME) -> Span:
    return Span(0, 1, iteration, 1, name, "c", 0.0, 100.0, 100.0 + seconds, None, time, PASSED)


def test_an_iteration_is_split_into_what_trl_does_too() -> None:
    starts = PhaseTime(start_s=2.0, load_s=1.0, work_s=4.0)
    spans = [
        *(span(2, "train_rollout", 3.0), span(2, "train_aggregate", 0.5), span(2, "batch_prepare", 1.0)),
        *(span(2, "eval_rollout", 1.5), span(2, "update", 7.0, starts), span(2, "iteration_end", 0.25)),
        span(3, "update", 5.0),
    ]
    parts = bench_trl.parts_of(spans)
    assert parts == {
        "rollout": 1.5,
        "scoring, merge, preparation": 0.75,
        "evaluation": 0.75,
        "starting the trainer": 1.5,
        "the update itself": 4.5,
        "rest": 0.125,
    }
    assert sum(parts.values()) == pytest.approx(sum(one.seconds for one in spans) / 2)
    assert parts.keys() <= set(bench_trl.PARTS)


def race(tool: str, seed: int, goal_s: float | None) -> bench_trl.Race:
    return bench_trl.Race(tool, seed, 5.0 + seed, 9.0, 3.5, {"rollout": 1.0}, goal_s, [0.25, 0.875], 2.5, 0.1)


def test_the_table_has_means_and_extremes_and_who_did_not_get_there() -> None:
    text = bench_trl.table([race("TRL", 0, 30.0), race("ours", 0, None), race("ours", 1, 40.0)], 0.8)
    rows = {}
    for line in text.splitlines():
        name, *cells = (cell.strip() for cell in line.split(" | "))
        rows[name] = cells
    assert rows["seconds"] == ["TRL (1)", "ours (2)"]
    assert rows["start-up, to the first token"] == ["5.00", "5.50 (5.00–6.00)"]
    assert rows["to a held-out 0.8"] == ["30.00", "40.00, 1 of 2"]
    assert rows["- evaluation"] == ["–", "–"] and rows["held-out at the end"] == ["0.88", "0.88 (0.88–0.88)"]
    assert len({len(line) for line in text.splitlines()}) == 1


def test_a_pages_share_counts_and_a_process_that_is_gone_counts_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert bench_trl.proportional_bytes(child.pid) > 0
    child.communicate(b"\n")
    assert bench_trl.proportional_bytes(child.pid) == 0
