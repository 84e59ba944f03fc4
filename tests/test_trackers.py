"""Trackers: refused by name where a package is missing, told each iteration once whoever leads, and nothing fails because of them.

The daemons run with stand-ins for accelerate and for one tracker, which write down what they are told. The tests that need torch use
accelerate itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, REPO, Cluster, Event
from fake_run import long_run
from test_hostile_files import KINDS

from fsbarrier.errors import UsageError
from fsbarrier.rundir.journal import read_events
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.stop_requests import request_stop
from fsbarrier.settings.resolve import known_names
from fsbarrier.settings.sources import from_words
from fsbarrier.start.begin import Request, begin
from fsbarrier.view.metric_names import metrics
from fsbarrier.workers.track import OneTracker, TrackerState

STATE = "class PartialState:\n    def __init__(self, cpu=False): pass\n"
TRACKING = """
import json, os

class Stand:
    def __init__(self, **arguments): self.arguments = arguments
    def start(self): self.say(start=self.arguments)
    def store_init_configuration(self, values): self.say(config=len(values))
    def log(self, values, step): self.say(step=step, values=values)
    def finish(self): self.say(finish=True)
    def say(self, **what):
        what["secret"], what["rank"] = os.environ.get("TRACKIO_KEY"), os.environ.get("RANK")
        with open(os.environ["HEARD"], "a") as stream:
            stream.write(json.dumps(what) + "\\n")

class Failing(Stand):
    def log(self, values, step):
        if not os.path.exists(os.environ["HEARD"] + ".mended"):
            raise ConnectionError("no route to host")
        super().log(values, step)

LOGGER_TYPE_TO_CLASS = {"trackio": Stand, "swanlab": Failing}
"""


def stand_ins(folder: Path) -> dict[str, str]:
    """The environment of daemons that find stand-ins for accelerate and two trackers."""
    package = folder / "stand-ins" / "accelerate"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "state": STATE, "tracking": TRACKING}.items():
        (package / f"{name}.py").write_text(text)
    for name in ("trackio", "swanlab"):
        (package.parent / f"{name}.py").write_text("")
    return {
        "PYTHONPATH": f"{REPO}:{package.parent}",
        "HEARD": str(folder / "heard"),
        "TRACKIO_KEY": "k",
        "RANK": "7",
    }


def heard(folder: Path) -> list[dict[str, Any]]:
    path = folder / "heard"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def through(log_path: Path, name: str) -> int:
    """The last iteration that a tracker has."""
    path = RunPaths(log_path).trackers / "progress.json"
    found = json.loads(path.read_text())["through"] if path.exists() else {}
    return int(found.get(name, 0))


def test_a_missing_package_is_refused_by_name(tmp_path: Path) -> None:
    chosen = from_words(
        [f"log_path={tmp_path}/run", "program=ping", "tracker.names=clearml,aim"], known_names()
    )
    with pytest.raises(
        UsageError, match=r"tracker\.names=clearml,aim: clearml needs the Python package clearml"
    ):
        begin(Request(tuple(chosen), {}, master=True))
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    chosen = from_words(["program=ping", "tracker.names=wandbb"], known_names())
    with pytest.raises(UsageError, match=r"tracker\.names: must be 'wandb', "):
        begin(Request(tuple(chosen), {}, master=True))


def test_figures_have_the_names_that_dashboards_know(tmp_path: Path) -> None:
    told = {
        "time": "2026-01-01T00:00:00+00:00",
        "mono_s": 1.0,
        "node_rank": 0,
        "generation": 1,
        "iteration": 3,
        "phase": 10,
    }
    lines = [
        {
            **told,
            "event": "rolled_out",
            "reward_mean": 0.5,
            "reward_std": 0.125,
            "without_signal_share": 0.25,
            "reward_parts/style": 0.75,
            "answer_tokens_mean": 9.5,
            "trajectories": 8,
            "merged": "x",
        },
        {
            **told,
            "event": "updated",
            "loss": 0.25,
            "entropy": 2,
            "clip_fraction": 0.1,
            "late": True,
        },
    ]
    journal = RunPaths(tmp_path).journal(0, 1)
    journal.parent.mkdir()
    journal.write_text("".join(json.dumps({"phase_name": "update", **line}) + "\n" for line in lines))
    events = read_events(tmp_path)
    like_trl = metrics(events, None, "trl")
    assert like_trl == {
        "reward": 0.5,
        "reward_std": 0.125,
        "frac_reward_zero_std": 0.25,
        "rolled_out/trajectories": 8.0,
        "loss": 0.25,
        "entropy": 2.0,
        "clip_ratio/region_mean": 0.1,
        "rewards/style/mean": 0.75,
        "completions/mean_length": 9.5,
    }
    like_verl: Mapping[str, float] = metrics(events, None, "verl")
    assert like_verl["critic/score/mean"] == like_verl["critic/rewards/mean"] == 0.5
    assert (like_verl["actor/pg_loss"], like_verl["actor/entropy"]) == (0.25, 2.0)


def has(cluster: Cluster, name: str, iteration: int) -> None:
    """Wait until a tracker has this iteration: each event of the journal is a moment to look."""
    cluster.wait_for(lambda event: through(cluster.log_path, name) >= iteration, deadline_s=250)


def failed(event: Event) -> bool:
    return event["event"] == "tracker_failed"


@pytest.mark.timeout(600)
def test_every_iteration_is_told_once_whoever_leads(tmp_path: Path) -> None:
    env = stand_ins(tmp_path)
    with Cluster(tmp_path, 2, *FAST, "tracker.names=trackio,swanlab", "tracker.project=mine") as cluster:
        cluster.env = {0: env, 1: env}
        cluster.start()
        has(cluster, "trackio", 1)
        told = cluster.wait_for(failed, deadline_s=250)
        assert (told["tracker"], told["why"]) == ("swanlab", "ConnectionError: no route to host")
        cluster.kill(0)
        here = through(cluster.log_path, "trackio")
        (tmp_path / "heard.mended").touch()
        has(cluster, "trackio", here + 1)
        has(cluster, "swanlab", here + 1)
        request_stop(cluster.log_path, now=False)
        assert cluster.wait(1, deadline_s=250) == {1: 0}
    run_id = json.loads(RunPaths(cluster.log_path).record.read_text())["run_id"]
    lines = heard(tmp_path)
    assert {(line["secret"], line["rank"]) for line in lines} == {("k", None)}
    starts = [line["start"] for line in lines if "start" in line]
    assert {"run_name": "mine", "name": run_id, "resume": "allow"} in starts
    of_trackio = [s for s in starts if s.get("name") == run_id]
    assert len(of_trackio) == 2 and of_trackio[0] == of_trackio[1]
    steps = [line["step"] for line in lines if "step" in line]
    done = through(cluster.log_path, "trackio")
    # One that was logged in the moment of the death comes again; and the mended one has got all that it had missed.
    assert sorted(set(steps)) == list(range(1, done + 1)) and 2 * done <= len(steps) + 2 <= 2 * done + 4
    assert all(
        {"reward", "eval_reward", "step_time"} <= line["values"].keys() for line in lines if "step" in line
    )
    table = (RunPaths(cluster.log_path).trackers / "iterations.csv").read_text().splitlines()
    assert table[0].startswith("iteration,policy_version,train_reward") and len(table) >= done


@pytest.mark.torch
def test_accelerate_itself_takes_what_it_is_told(tmp_path: Path) -> None:
    """Its Trackio tracker, with a stand-in for Trackio alone: what each of accelerate's trackers is made with is checked nowhere else."""
    run = long_run(tmp_path / "run", 2, lose_at=None)
    # What closes a session: its last policy is evaluated at the end of its last iteration.
    run.line(0, "evaluated", (2, 13, 0), reward_mean=0.625, policy_version=2, final=True)
    log_path = run.log_path
    (tmp_path / "trackio.py").write_text(
        "import json, os\n"
        "class Run:\n"
        "    config = {}\n"
        "    def log(self, values, step): open(os.environ['HEARD'], 'a').write(json.dumps({'step': step, **values}) + '\\n')\n"
        "    def finish(self): pass\n"
        "def init(project, name, resume): assert resume == 'allow'; return Run()\n"
        "config = type('Config', (), {'update': lambda self, *a, **k: None})()\n"
    )
    spec = {"log_path": str(log_path), "names": ["trackio"], "names_like": "verl", "project": "p"}
    code = f"from fsbarrier.workers.track import Trackers; Trackers({spec}, print).bring(2)"
    env = {**os.environ, "PYTHONPATH": f"{REPO}:{tmp_path}", "HEARD": str(tmp_path / "heard")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert [line["step"] for line in heard(tmp_path)] == [1, 2]
    assert all("critic/score/mean" in line for line in heard(tmp_path))
    assert [line.get("last_policy/val-core/reward/mean") for line in heard(tmp_path)] == [None, 0.625]


@pytest.mark.parametrize("kind", ["fifo", "link", "sparse"])
def test_the_trackers_progress_is_read_from_a_plain_file_alone(kind: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text('{"through": {}, "ids": {}}')
    KINDS[kind](tmp_path / "progress.json")
    with pytest.raises(OSError, match=r"plain file|bytes"):
        TrackerState.read(tmp_path / "progress.json")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"through": {"wandb": Infinity}, "ids": {}}',
        '{"through": {"a": "x"}, "ids": {}}',
        "[]",
    ],
)
def test_an_invalid_progress_file_of_the_trackers_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(ValueError):
        TrackerState.read(tmp_path / "progress.json")


def test_a_tracker_writes_behind_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "trackio").symlink_to(tmp_path / "outside")
    one = OneTracker("trackio", "project", "run", tmp_path / "trackers", {})
    with pytest.raises(OSError, match="link"):
        one.log({}, 1, TrackerState())
