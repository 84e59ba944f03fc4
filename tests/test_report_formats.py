"""`fsbarrier report --csv | --perfetto | --prometheus` over hand-written runs."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from commands import typed
from fake_run import FakeRun, long_run

from fsbarrier.program import PHASE_NAMES

SAMPLE = re.compile(r'^fsbarrier_[a-z0-9_]+\{run="[^"]*"(,state="[a-z]+")?\} -?[0-9.e+-]+$')


def written(run: FakeRun, tmp_path: Path, *formats: str) -> list[str]:
    words = [word for name in formats for word in (f"--{name}", str(tmp_path / name))]
    said = typed("report", "--log-path", run.log_path, *words)
    assert said.out == "".join(f"{tmp_path / name}\n" for name in formats)
    return [(tmp_path / name).read_text() for name in formats]


def test_the_table_has_a_line_an_iteration(tmp_path: Path) -> None:
    (text,) = written(long_run(tmp_path / "run", 6), tmp_path, "csv")
    assert not (tmp_path / "run" / "report.html").exists(), "the page was not asked for"
    rows = list(csv.DictReader(text.splitlines()))
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        phases = sum(float(row[f"{name}_s"]) for name in PHASE_NAMES if row.get(f"{name}_s"))
        assert float(row["seconds"]) == pytest.approx(phases, rel=1e-3)
    for row in rows:
        assert (
            0 <= float(row["train_reward"]) <= 1 and int(row["policy_version"]) == int(row["iteration"]) - 1
        )
    assert float(rows[-1]["update_loss"]) == float(rows[-1]["update_loss"])


def test_the_trace_has_every_nodes_rows_and_their_work(tmp_path: Path) -> None:
    (text,) = written(long_run(tmp_path / "run", 2, lose_at=None), tmp_path, "perfetto")
    events = json.loads(text)["traceEvents"]
    names = {
        event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert names == {"node 0", "node 1", "node 2"}
    complete = [event for event in events if event["ph"] == "X"]
    rows = [event for event in complete if event["tid"] == 0]
    assert len(rows) == 3 * 2 * 14 and {event["args"]["iteration"] for event in rows} == {1, 2}
    assert all(event["dur"] >= 0 and event["ts"] > 1e15 for event in complete), "microseconds since 1970"
    for work in (event for event in complete if event["tid"] == 1):
        row = next(
            event
            for event in rows
            if (event["pid"], event["args"]) == (work["pid"], work["args"])
            and work["name"].startswith(f"{event['name']}: ")
        )
        assert work["name"].split(": ")[1] in ("start", "work")
        assert row["ts"] - 1 <= work["ts"] and work["ts"] + work["dur"] <= row["ts"] + row["dur"] + 1


def test_the_metrics_are_prometheus_text(tmp_path: Path) -> None:
    (text,) = written(long_run(tmp_path / "run", 4), tmp_path, "prometheus")
    assert text.endswith("\n")
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.match(line) for line in samples), samples
    values = {line.split("{")[0]: line.split()[-1] for line in samples}
    assert values["fsbarrier_iteration"] == "4" and values["fsbarrier_nodes_lost_total"] == "1"
    assert (values["fsbarrier_nodes"], values["fsbarrier_nodes_running"]) == ("3", "0")
    assert "fsbarrier_train_reward" in values and ',state="' in text
    typed = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed)) == len(samples)


def test_a_phases_name_is_no_formula_and_no_line_of_its_own(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 2)
    for journal in run.paths.events.iterdir():
        journal.write_text(journal.read_text().replace('"train_rollout"', '"=cmd()\\nevil 1\\u001b[31m"'))
    table, trace, metrics = written(run, tmp_path, "csv", "perfetto", "prometheus")
    columns = next(csv.reader(table.splitlines()))
    assert all(re.fullmatch(r"\w+", name, re.ASCII) for name in columns)
    assert "_cmd___evil_1__31m_s" in columns and json.loads(trace)
    samples = [line for line in metrics.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.match(line) for line in samples) and "\x1b" not in metrics


def test_the_last_policy_and_each_set_have_figures_of_their_own(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 2, lose_at=None)
    parts = {"reward_parts/right": 0.75, "reward_parts/right_failed": 0, "answer_tokens_mean": 12.5}
    run.line(0, "rolled_out", (2, 4, 0), after=1, split="train", reward_mean=0.4, reward_errors=3, **parts)
    figures = {"reward_mean": 0.5, "policy_version": 2, "aime/pass_at_8": 0.25, "aime/pass_at_8_se": 0.125}
    run.line(0, "evaluated", (2, 13, 0), final=True, split="test", **figures)
    table, metrics = written(run, tmp_path, "csv", "prometheus")
    last = list(csv.DictReader(table.splitlines()))[-1]
    # As the iteration that would begin with this policy.
    assert (last["iteration"], last["policy_version"], last["test_reward"]) == ("3", "2", "0.5")
    assert (last["eval_aime_pass_at_8"], last["eval_aime_pass_at_8_se"]) == ("0.25", "0.125")
    assert all(SAMPLE.match(line) for line in metrics.splitlines() if not line.startswith("#"))
    assert "fsbarrier_eval_aime_pass_at_8{" in metrics
    typed("report", "--log-path", run.log_path, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "0.25 ± 0.12" in page and "Reward: right" in page and "Tokens per answer" in page
    before = list(csv.DictReader(table.splitlines()))[-2]
    assert (before["rollout_reward_parts_right"], before["rollout_answer_tokens_mean"]) == ("0.75", "12.5")
    assert "rollout_agent_errors" not in before and before["rollout_reward_errors"] == "3.0"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 1, lose_at=None)
    said = typed("report", "--log-path", run.log_path, "--csv", tmp_path, code=2)
    assert f"--csv {tmp_path}: is a directory" in said.err
