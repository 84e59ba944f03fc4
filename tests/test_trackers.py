"""Trackers: refused by name where a package is missing, told each iteration once whoever leads, and nothing fails because of them.

The daemons run with stand-ins for accelerate and for one tracker, which write down what they are told. The tests that need torch use
accelerate itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, REPO, Cluster, Event
from fake_run import long_run

from fsbarrier.cli.start.begin import Request, begin
from fsbarrier.errors import UsageError
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import known_names
from fsbarrier.settings.sources import from_words
from fsbarrier.workers.track import OneTracker, TrackerState

STATE = "class PartialState:\n    def __init__(self, cpu=False): pass\n"
TRACKING = """
import json, os

class Stand:
    def __init__(self, **arguments): self.arguments = arguments
    def start(self): self.say(start=self.arguments)
    def store_init_configuration(self, values): self.say(config=len(values))
    def log(self, values, step, **more): self.say(step=step, values=values)
    def log_table(self, name, columns, data, step, commit): self.say(table=name, of=step, columns=columns, data=data)
    def finish(self): self.say(finish=True)
    def say(self, **what):
        what["secret"], what["rank"] = os.environ.get("WANDB_API_KEY"), os.environ.get("RANK")
        with open(os.environ["HEARD"], "a") as stream:
            stream.write(json.dumps(what) + "\\n")

class Failing(Stand):
    class writer:
        add_text = staticmethod(lambda tag, text, step: None)

    def log(self, values, step):
        if not os.path.exists(os.environ["HEARD"] + ".mended"):
            raise ConnectionError("no route to host")
        super().log(values, step)

LOGGER_TYPE_TO_CLASS = {"wandb": Stand, "tensorboard": Failing}
"""


def stand_ins(folder: Path) -> dict[str, str]:
    """The environment of daemons that find stand-ins for accelerate and two trackers."""
    package = folder / "stand-ins" / "accelerate"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "state": STATE, "tracking": TRACKING}.items():
        (package / f"{name}.py").write_text(text)
    for name in ("wandb", "tensorboard"):
        (package.parent / f"{name}.py").write_text("")
    return {
        "HEARD": str(folder / "heard"),
        "WANDB_API_KEY": "k",
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
        [f"log_path={tmp_path}/run", "program=ping", "tracker.names=wandb,mlflow"], known_names()
    )
    with pytest.raises(UsageError, match=r"tracker\.names=wandb: needs the Python package wandb"):
        begin(Request(tuple(chosen), {}, master=True))
    assert not (tmp_path / "run").exists()


def has(cluster: Cluster, name: str, iteration: int) -> None:
    """Wait until a tracker has this iteration: each event of the journal is a moment to look."""
    cluster.wait_for(lambda event: through(cluster.log_path, name) >= iteration)


def failed(event: Event) -> bool:
    return event["event"] == "tracker_failed"


@pytest.mark.timeout(600)
def test_every_iteration_is_told_once_whoever_leads(tmp_path: Path) -> None:
    env = stand_ins(tmp_path)
    with Cluster(
        tmp_path,
        2,
        *FAST,
        "toy.tasks=4",
        "--rl-phase",
        "rollout",
        "tracker.names=wandb,tensorboard",
        *("tracker.project=mine", "tracker.run_name=my first/run", "tracker.samples=true"),
        real=True,
    ) as cluster:
        cluster.env = {0: env, 1: env}
        cluster.modules = f"{tmp_path / 'stand-ins'}:{REPO}"
        cluster.start()
        has(cluster, "wandb", 1)
        told = cluster.wait_for(failed)
        assert (told["tracker"], told["why"]) == ("tensorboard", "ConnectionError: no route to host")
        cluster.kill(0)
        here = through(cluster.log_path, "wandb")
        (tmp_path / "heard.mended").touch()
        has(cluster, "wandb", here + 1)
        has(cluster, "tensorboard", here + 1)
        cluster.stop()
        assert cluster.wait(1) == {1: 0}
    run_id = json.loads(cluster.paths.record.read_text())["run_id"]
    lines = heard(tmp_path)
    assert {(line["secret"], line["rank"]) for line in lines} == {("k", None)}
    starts = [line["start"] for line in lines if "start" in line]
    of_wandb = [s for s in starts if s.get("name") == "my first/run"]
    assert {s["run_name"] for s in starts if "logging_dir" in s} == {"my_first_run"}
    tables = [line for line in lines if "table" in line]
    assert tables[0]["columns"] == ["iteration", "split", "which", "about", "messages"]
    assert all(
        row[0] == str(one["of"]) and row[4].startswith("user: task ") for one in tables for row in one["data"]
    )
    assert (of_wandb[0]["run_name"], of_wandb[0]["id"], of_wandb[0]["resume"]) == ("mine", run_id, "allow")
    assert len(of_wandb) == 2 and of_wandb[0] == of_wandb[1]
    steps = [line["step"] for line in lines if "step" in line]
    done = through(cluster.log_path, "wandb")
    # One that was logged in the moment of the death comes again; and the mended one has got all that it had missed.
    assert sorted(set(steps)) == list(range(1, done + 1)) and 2 * done <= len(steps) + 2 <= 2 * done + 4
    assert all(
        {"train_reward", "test_reward", "seconds"} <= line["values"].keys()
        for line in lines
        if "step" in line
    )
    table = (cluster.paths.trackers / "iterations.csv").read_text().splitlines()
    assert table[0].startswith("iteration,policy_version,train_reward") and len(table) >= done


def test_a_closing_evaluation_without_a_judged_answer_ends_no_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = long_run(tmp_path / "run", 2, lose_at=None)
    run.line(0, "evaluated", (2, 13, 0), reward_mean=None, policy_version=2, final=True)
    for name, value in stand_ins(tmp_path).items():
        monkeypatch.setenv(name, value)
    code = (
        "from pathlib import Path; from fsbarrier.settings.sections import TrackerSettings; from fsbarrier.workers.track import Trackers\n"
        f"Trackers(Path({str(run.log_path)!r}), TrackerSettings(('wandb',), 'p'), print).bring(2)"
    )
    env = {**os.environ, "PYTHONPATH": f"{REPO}:{tmp_path / 'stand-ins'}"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    told = {line["step"]: line["values"] for line in heard(tmp_path) if "step" in line}
    assert [*told] == [1, 2] and "last_policy/test_reward" not in told[2]


@pytest.mark.torch
def test_accelerate_itself_takes_what_it_is_told(tmp_path: Path) -> None:
    """Its W&B tracker, with a stand-in for W&B alone: what each of accelerate's trackers is made with is checked nowhere else."""
    run = long_run(tmp_path / "run", 2, lose_at=None)
    # What closes a session: its last policy is evaluated at the end of its last iteration.
    run.line(0, "evaluated", (2, 13, 0), reward_mean=0.625, policy_version=2, final=True)
    log_path = run.log_path
    (tmp_path / "wandb.py").write_text(
        "import json, os\n"
        "class Run:\n"
        "    config = {}\n"
        "    def log(self, values, step, commit): open(os.environ['HEARD'], 'a').write(json.dumps({'step': step, **values}) + '\\n')\n"
        "    def finish(self): pass\n"
        "def init(project, name, resume, **more): assert resume == 'allow'; return Run()\n"
        "config = type('Config', (), {'update': lambda self, *a, **k: None})()\n"
    )
    code = (
        "from pathlib import Path; from fsbarrier.settings.sections import TrackerSettings; from fsbarrier.workers.track import Trackers\n"
        f"Trackers(Path({str(log_path)!r}), TrackerSettings(('wandb',), 'p'), print).bring(2)"
    )
    env = {**os.environ, "PYTHONPATH": f"{REPO}:{tmp_path}", "HEARD": str(tmp_path / "heard")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert [line["step"] for line in heard(tmp_path)] == [1, 2]
    assert all("train_reward" in line for line in heard(tmp_path))
    assert [line.get("last_policy/test_reward") for line in heard(tmp_path)] == [None, 0.625]


def test_a_tracker_writes_behind_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "wandb").symlink_to(tmp_path / "outside")
    one = OneTracker("wandb", "project", "run", tmp_path / "trackers", {})
    with pytest.raises(OSError, match="link"):
        one.log({}, 1, TrackerState())
