"""Which node takes which task: what another has not begun, and refills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, REPO, Cluster, rolled_out_twice
from commands import typed
from test_rollout import SAMPLES, Fake, finish, make_spec, run, start
from waiting import DEADLINE_S, until

from fsbarrier.aggregate import Part, aggregate
from fsbarrier.protocol.assign import TaskSet, draw_rounds
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.trajectories import load, scan_rank_file
from scripts.lab.bench_take_over import roll_out, toy_spec

# --- real rollouts ----------------------------------------------------------------------------------------------------


SPEEDS, WEIGHTS = (1.0, 1.0, 1 / 3), (1.0, 1.0, 1.0)


def test_the_tasks_of_a_slower_node_are_taken_over(tmp_path: Path) -> None:
    for take_over in (True, False):
        folder = tmp_path / str(take_over)
        folder.mkdir()
        outcome = roll_out(folder, 30, 2.0 if take_over else 0.3, SPEEDS, WEIGHTS, take_over=take_over)
        assert sorted(outcome.tasks) == list(range(30))
        groups = [result["groups"] for result in outcome.results]
        assert groups[2] < 10 < max(groups) if take_over else groups == [10, 10, 10]


@pytest.mark.slow
def test_a_node_three_times_slower_costs_little(tmp_path: Path) -> None:
    """At most so many times what these nodes could do at best; the same with fixed shares, to see that this could fail."""
    over_ideal = []
    for number in range(
        4
    ):  # on a busy machine a process may be held up by more than a tenth; not time and again
        (tmp_path / f"try-{number}").mkdir()
        outcome = roll_out(tmp_path / f"try-{number}", 150, 3.0, SPEEDS, WEIGHTS, take_over=True)
        assert sorted(outcome.tasks) == list(range(150))
        first, second, slow = (result["groups"] for result in outcome.results)
        over_ideal.append(outcome.over_ideal)
        if outcome.over_ideal <= 1.1 and slow < min(first, second):
            break
    else:
        raise AssertionError(f"times the ideal: {over_ideal}")
    (tmp_path / "fixed").mkdir()
    fixed = roll_out(tmp_path / "fixed", 30, 0.6, SPEEDS, WEIGHTS, take_over=False)
    assert fixed.over_ideal > 1.5


def test_a_toy_rollout_that_is_killed_and_started_again_goes_on(tmp_path: Path) -> None:
    shares = [[0, 1, 2, 3], [4, 5, 6, 7]]
    spec = toy_spec(tmp_path, 0, shares, seconds=0.4, speed=1.0)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [
        sys.executable,
        "-m",
        "fsbarrier.workers.toy",
        "rollout",
        "--spec",
        str(tmp_path / "spec.json"),
    ]
    part = Path(spec["rollout"]["part"])
    process = subprocess.Popen(command, cwd=REPO)
    # One of the other's is among them.
    until(
        lambda: part.exists() and len(scan_rank_file(part).groups) >= 5, lives=lambda: process.poll() is None
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(scan_rank_file(part).groups)
    subprocess.run(command, cwd=REPO, check=True, timeout=DEADLINE_S)
    assert 5 <= kept <= 8
    assert sorted(group.task_index for group in scan_rank_file(part).groups) == list(range(8))
    result = json.loads((tmp_path / "result-0.json").read_text())["report"]
    assert (result["taken_over"], sorted(result["tasks"])) == (4, list(range(8)))


# --- whole runs -------------------------------------------------------------------------------------------------------

TRAIN_ONLY = ("--rl-phase", "rollout", "--rollout-split", "train-only")


def merged(log_path: Path, iteration: int = 1) -> dict[str, Any]:
    return load(RunPaths(log_path).merged("train", iteration))


def test_a_node_killed_while_it_takes_over_costs_nothing(tmp_path: Path) -> None:
    # The others have done their 6 tasks each when node 2 still has most of its 36: there is time to strike.
    slow = ("toy.tasks=48", "toy.phase_s=1.5", "custom.speeds=[1,1,0.2]", "--rank-weights", "1,1,6")
    with Cluster(tmp_path, 3, "--iterations", "1", *TRAIN_ONLY, *FAST, *slow) as cluster:
        cluster.start()
        folder = RunPaths(cluster.log_path).claims(1, 1, "train")
        # One task after the other: who takes the second has finished the first.
        until(
            lambda: folder.is_dir() and max(taken_over(folder, 2).values(), default=0) >= 2,
            cluster.said_by_all,
        )
        ((victim, _),) = taken_over(folder, 2).most_common(1)
        cluster.kill(victim)
        survivors = [rank for rank in range(3) if rank != victim]
        assert cluster.wait(*survivors) == dict.fromkeys(survivors, 0), cluster.said(survivors[0])
        done = merged(cluster.log_path)["trajectories"]
        assert Counter(item["task_index"] for item in done) == Counter(range(48))
        stolen = [item for item in done if item["task_index"] >= 12 and item["node_rank"] == victim]
        assert stolen  # what the dead node had taken over and finished is not done again
        assert {item["generation"] for item in done} == {1, 2}


def taken_over(folder: Path, owner: int) -> Counter[int]:
    """How many lots of `owner`'s share each other node has claimed."""
    names = [name for name in os.listdir(folder) if name.startswith(f"lot-{owner:04d}-")]
    claimed = [int((folder / name).read_text().split()[0]) for name in names]
    return Counter(rank for rank in claimed if rank != owner)


def test_the_log_says_why_shares_are_fixed(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, "--iterations", "1", *TRAIN_ONLY, *FAST, "rollout.take_over=false") as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        said = [event for event in cluster.events() if event["event"] == "shares_fixed"]
        assert [(event["node_rank"], event["why"]) for event in said] == [(0, "rollout.take_over is off")]
        (log,) = cluster.log_path.glob("logs/*/node_1/rollout.log")
        assert "only does its own share: rollout.take_over is off" in log.read_text()
        assert not RunPaths(cluster.log_path).claims(1, 1, "train").exists()
        ranks = {item["task_index"]: item["node_rank"] for item in merged(cluster.log_path)["trajectories"]}
        assert ranks == {task: task // 12 for task in range(24)}


def test_stragglers_are_cut_off_and_named(tmp_path: Path) -> None:
    tail = ("rollout.completion_threshold=0.8", "rollout.grace_s=0.2")
    slow = ("custom.speeds=[1,0.02]", "rollout.take_over=false", *tail)
    with Cluster(
        tmp_path, 2, "--iterations", "2", *TRAIN_ONLY, "--rank-weights", "9,1", *FAST, *slow
    ) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        first = merged(cluster.log_path, 1)
        cut_off = first["metadata"]["cut_off"]
        assert 1 <= len(cut_off) <= 4 and first["metadata"]["missing"] == []
        there = [item["task_index"] for item in first["trajectories"]]
        assert sorted(there + cut_off) == list(range(24))
        old, new = (RunPaths(cluster.log_path).claims(1, iteration, "train") for iteration in (1, 2))
        assert new.exists() and not old.exists()
        # Both iterations draw all tasks.
        second = merged(cluster.log_path, 2)["metadata"]["cut_off"]
        never = sorted({*cut_off} & {*second})
        status = json.loads(typed("status", cluster.log_path, "--json").out)
        assert sum(tasks for _, _, tasks in status["draws"]["counts"]) == 24
        assert [*status["draws"]["named"]] == [f"train-{task}" for task in never]
        line = f"{len(never)} of 24 drawn tasks never finished, so not trained: " + ", ".join(
            f"train-{task}" for task in never
        )
        typed("report", cluster.log_path, "--out", tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        for shown in (typed("status", cluster.log_path).out, page):
            assert line in " ".join(shown.split()) if never else "at least once" in shown


# --- more than is wanted ----------------------------------------------------------------------------------------------


def test_of_more_groups_the_first_with_signal_are_kept(tmp_path: Path) -> None:
    from trajectory_files import trajectory

    from fsbarrier.trajectories import RankFileWriter

    flat, order = {1, 4, 5}, [5, 4, 3, 2, 1, 0]
    path = tmp_path / "part"
    with RankFileWriter(path, header={"run_id": "r"}) as writer:
        for task in range(6):
            rewards = (1.0, 1.0) if task in flat else (0.0, 1.0)
            writer.append_group(
                task, [trajectory(task, number) | {"reward": value} for number, value in enumerate(rewards)]
            )

    def merge(keep: int) -> tuple[list[int], dict[str, Any]]:
        out = tmp_path / f"merged-{keep}"
        report = aggregate([Part(path)], out, metadata={}, expected=order, keep=keep)
        assert report.left_out == 6 - report.groups
        there = load(out)
        return sorted({item["task_index"] for item in there["trajectories"]}), there["metadata"]

    tasks, metadata = merge(2)
    assert tasks == [2, 3] and (metadata["surplus"], metadata["without_signal"]) == ([0], [5, 4, 1])
    assert metadata["rolled_out"] == {"trajectories": 12, "reward_mean": 0.75}
    assert merge(4)[0] == [0, 2, 3, 5]  # too few with signal: filled up
    assert merge(100)[0] == list(range(6))


# --- refills: rollouts in rounds --------------------------------------------------------------------------------------------------------

#: three rounds of four: no signal; two groups with signal; all with signal
PROMPTS = [
    *(f"{n}a=" for n in range(4)),
    "4a=",
    "5a!mixed=",
    "6a=",
    "7a!mixed=",
    *(f"{n}a!mixed=" for n in "89bc"),
]


def in_rounds(folder: Path, url: str, rank: int, **changes: Any) -> Path:
    """The spec of one of two nodes that share the claims in `folder`."""
    shares = {"1": [0, 1, 4, 5, 8, 9], "2": [2, 3, 6, 7, 10, 11]}
    (folder / f"node-{rank}").mkdir(parents=True)
    known = {
        "node_rank": rank,
        "shares": shares,
        "claims": str(folder / "claims"),
    }
    known |= {"keep": 2}
    known |= {"refills": [0, 0, 0]}
    spec = make_spec(folder / f"node-{rank}", url, PROMPTS, **{**known, **changes})
    written = json.loads(spec.read_text())
    (whole,) = written["rounds"]
    written["rounds"] = [{**whole, "tasks": [*range(begin, begin + 4)]} for begin in (0, 4, 8)]
    spec.write_text(json.dumps(written))
    return spec


def tasks_in(*specs: Path) -> list[int]:
    parts = [scan_rank_file(spec.parent / "trajectories" / "part") for spec in specs]
    return sorted(group.task_index for part in parts for group in part.groups)


def test_nodes_go_on_together_until_there_is_enough(tmp_path: Path, fake: Fake) -> None:
    specs = [in_rounds(tmp_path, fake.url, rank) for rank in (1, 2)]
    ended = [finish(process, spec) for process, spec in [(start(spec), spec) for spec in specs]]
    assert [done.code for done in ended] == [0, 0], [done.stderr for done in ended]
    # The second round brings the two that are wanted, and nobody begins the third.
    assert [done.result["rounds"] for done in ended] == [2, 2]
    assert tasks_in(*specs) == list(range(8))
    for spec in specs:
        shown = json.loads((spec.parent / "progress.json").read_text())
        assert shown["done"] == shown["total"]


@pytest.mark.parametrize(
    ("keep", "already", "rounds"), [(99, (0, 0, 0), 3), (2, (2, 0, 0), 1), (2, (0, 7, 0), 2)]
)
def test_the_last_round_is_the_last_and_what_is_there_counts(
    tmp_path: Path, fake: Fake, keep: int, already: tuple[int, ...], rounds: int
) -> None:
    changes = {"keep": keep, "refills": already}
    alone = in_rounds(tmp_path, fake.url, 1, **changes, shares={"1": [*range(12)], "2": []})
    assert run(alone).result["rounds"] == rounds and tasks_in(alone) == list(range(4 * rounds))


def test_a_node_waits_for_the_others_and_is_started_again_in_a_later_round(
    tmp_path: Path, fake: Fake
) -> None:
    spec, other = (in_rounds(tmp_path, fake.url, rank, fixed_shares="as asked for") for rank in (1, 2))
    process, waited = start(spec), tmp_path / "claims" / "done-0001-0000-000000"

    def lives() -> bool:
        return process.poll() is None

    until(waited.exists, lives=lives)
    assert lives() and tasks_in(spec) == [0, 1]
    # Else its daemon would take a long wait for a program that hangs.
    shown, written_at = spec.parent / "progress.json", set[int]()

    def written_again() -> bool:
        written_at.add(shown.stat().st_mtime_ns)
        return len(written_at) >= 4

    until(written_again, lives=lives)
    process.kill()
    finish(process, spec)
    second = start(other)
    again = run(spec)
    assert (again.code, again.result["rounds"], again.result["resumed_groups"]) == (0, 2, 2)
    assert finish(second, other).result["rounds"] == 2 and tasks_in(spec, other) == list(range(8))
    # Between the file's end and the result.
    assert run(spec).result["rounds"] == 2


# --- a whole run --------------------------------------------------------------------------------------------------------


def test_a_node_that_dies_in_a_refill_costs_only_what_it_had_in_flight(tmp_path: Path, fake: Fake) -> None:
    """Its finished groups of both rounds are adopted, and the survivor comes to the same rounds."""
    first, second, third = draw_rounds([TaskSet("", range(12))], 4, 3, seed=0, iteration=1)
    # In the second round each node's first task is done at once; its second waits at the gate.
    gated = {second[1], second[3]}
    data = tmp_path / "data"
    data.mkdir()
    kinds = {**dict.fromkeys(first, ""), **dict.fromkeys(second, "!mixed"), **dict.fromkeys(third, "!mixed")}
    lines = []
    for task in range(12):
        gate = "!gate" if task in gated else ""
        lines.append(
            json.dumps(
                {"prompt": f"{task:02d}a{kinds[task]}{gate}=", "answer": f"{''.join(sorted(f'{task:02d}a'))}"}
            )
        )
    (data / "train.jsonl").write_text("\n".join(lines) + "\n")
    (data / "test.jsonl").write_text(lines[0] + "\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    flags = ("--model", str(model), "--data-path", str(data), "--iterations", "1", *FAST)
    flags += (
        "--rl-phase",
        "rollout",
        "--rollout-split",
        "train-only",
        "--debug-mode",
        f"engine.url={fake.url}",
    )
    flags += ("engine.api_key_env=VLLM_API_KEY", f"rollout.samples={SAMPLES}", "rollout.tasks=4")
    flags += (
        "rollout.max_refills=2",
        "rollout.concurrency=2",
        "rollout.max_tokens=32",
        "engine.max_model_len=64",
    )
    with Cluster(tmp_path, 2, *flags, "rollout.take_over=false", program="rl") as cluster:
        cluster.env = {rank: {"VLLM_API_KEY": "the key"} for rank in range(2)}
        cluster.start()
        paths = cluster.paths

        def durable() -> set[int]:
            parts = paths.trajectories("train").glob("*.part")
            return {group.task_index for part in parts for group in scan_rank_file(part).groups}

        until(lambda: durable() == {*first, second[0], second[2]}, cluster.said_by_all)
        cluster.kill(1)
        cluster.wait_for(lambda e: e["event"] == "generation_started" and e["number"] == 2)
        (fake.folder / "gate").touch()
        assert cluster.wait(0) == {0: 0}, cluster.said(0)
        merged = load(paths.merged("train", 1))
        assert {t["task_index"] for t in merged["trajectories"]} == set(second)
        assert merged["metadata"]["without_signal"] == first and merged["metadata"]["surplus"] == []
        assert rolled_out_twice(cluster.log_path, 1, "train") == []
        (event,) = [e for e in cluster.events() if e["event"] == "rolled_out"]
        told = (event["rounds"], event["groups_without_signal"], event["groups"], event["left_out"])
        assert told == (2, 4, 4, 4)
