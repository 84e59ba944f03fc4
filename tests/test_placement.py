"""Which accelerators serve which role, which nodes may take part, and what goes on where a node is lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cluster import FAST, Cluster
from commands import typed
from waiting import until

from fsbarrier.engine.accelerators import Accelerator, detect
from fsbarrier.errors import NodesRefused
from fsbarrier.run import job_runner
from fsbarrier.run.admission import GIB, Problem, check_nodes
from fsbarrier.run.fingerprint import Fingerprint
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.placement import Ranges
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import Settings
from fsbarrier.trajectories import load

APART = ("placement.rollout=node:1-2", "placement.update=node:0")


# --- ranges -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "each", "held"),
    [
        ("all", 8, {0: [*range(8)], 1: [*range(8)], 2: [*range(8)], 3: [*range(8)]}),
        ("all", 0, {0: [], 1: [], 2: [], 3: []}),
        ("0-19", 8, {0: [*range(8)], 1: [*range(8)], 2: [0, 1, 2, 3]}),
        ("20-23", 8, {2: [4, 5, 6, 7]}),
        ("24-31", 8, {3: [*range(8)]}),
        ("0, 9-10 ,31", 8, {0: [0], 1: [1, 2], 3: [7]}),
        ("node:0-1,3", 2, {0: [0, 1], 1: [0, 1], 3: [0, 1]}),
        ("node:2", 0, {2: []}),
        ("0-3", 0, {}),
    ],
)
def test_ranges_count_accelerators_in_rank_order(
    text: str, each: int, held: Mapping[int, Sequence[int]]
) -> None:
    assert {rank: [*own] for rank, own in Ranges.parse(text).holders(range(4), each).items()} == held


def test_a_lost_node_moves_nobody_elses_accelerators() -> None:
    assert Ranges.parse("8-15").holders([1, 3], 8) == {1: tuple(range(8))}


@pytest.mark.parametrize(
    "text", ["", "3-1", "a", "node:", "0-", "-1", "0;1", "node:0-1,node:2", "ALL", "1.5"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be all, accelerators such as 0-19,24, or whole nodes"):
        Ranges.parse(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["placement.update=3-1"], "placement.update=3-1: must be all, accelerators such as"),
        (["placement.rollout=node:1-3"], "placement.rollout=node:1-3: there is no node 3; nodes are 0 to 2"),
        (
            ["rollout.ahead=1"],
            "rollout.ahead=1: the nodes that train and those that roll out must be different ones",
        ),
        (
            ["rollout.ahead=1", "placement.rollout=node:0-1", "placement.update=node:1-2"],
            "must be different ones",
        ),
        (
            ["placement.rollout=node:0", "placement.update=node:2"],
            "placement.rollout=node:0 and placement.update=node:2: node 1 would have nothing to do; give a role or --allow-idle",
        ),
        (
            ["--expect-gpus", "24", "placement.rollout=0-15", "placement.update=16-19"],
            "accelerators 20, 21, 22, 23 would have nothing to do",
        ),
        (["rollout.ahead=2", *APART], "rollout.ahead: must be a whole number ≥ 0 and ≤ 1, got 2"),
    ],
)
def test_a_mistake_ends_the_start(tmp_path: Path, words: list[str], said: str) -> None:
    start = ("run", "--master", "--num-nodes", "3", "--program", "toy", "--log-path", str(tmp_path / "run"))
    told = typed(*start, *words, code=2).err
    assert said in told and told.count("\n") == 1, told
    assert not (tmp_path / "run").exists()


def placed(rollout: str, update: str, counts: Sequence[int], ahead: int = 0, idle: bool = False) -> list[str]:
    """What a start says of nodes with so many accelerators."""
    settings = Settings(num_nodes=len(counts), rank_weights=(1.0,) * len(counts)).with_values(
        {"placement.rollout": rollout, "placement.update": update, "rollout.ahead": ahead, "allow_idle": idle}
    )
    nodes = {
        rank: replace(Fingerprint(), accelerators=[("nvidia X", 80 * 2**30, 0)] * count)
        for rank, count in enumerate(counts)
    }
    hosts = {rank: f"host{rank}" for rank in nodes}
    return [
        re.sub(" +", " ", str(one))
        for one in check_nodes(nodes, hosts, settings, 0)
        if "placement" in one.what + one.found or one.what in ("nothing to do", "rollout.ahead=1")
    ]


def test_the_nodes_are_compared_with_the_ranges() -> None:
    assert placed("0-19", "24-31", [8] * 4, ahead=1) == [
        "refused nothing to do 4 of node 2, 5 of node 2, 6 of node 2, 7 of node 2; give them a role or start with --allow-idle"
    ]
    assert placed("0-2", "2", [4], idle=True) == ["warning nothing to do 3 of node 0"]
    assert placed("0-7", "8-16", [8, 8]) == [
        "refused placement.update=8-16 there is no accelerator 16; 2 nodes with 8 each have 0 to 15"
    ]
    (refused,) = placed("0-5", "all", [4, 2])
    assert refused.startswith(
        "refused placement.rollout=0-5 numbers count accelerators of equal nodes, and node 0 has 4, node 1 has 2"
    )
    (refused,) = placed("0-11", "12-15", [8, 8], ahead=1)
    assert "node 1 both trains and rolls out" in refused
    assert placed("node:0", "node:1", [4, 2], ahead=1) == []


# --- whole runs ---------------------------------------------------------------------------------------------------------------


def rolled_out(log_path: Path, iteration: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load(RunPaths(log_path).merged("train", iteration))["trajectories"]
    return found


def versions(log_path: Path, iterations: int, tasks: int = 24) -> list[list[int]]:
    """The policy versions in each iteration's merged file, whose tasks are there once each."""
    for iteration in range(1, iterations + 1):
        counted = Counter(one["task_index"] for one in rolled_out(log_path, iteration))
        assert counted == Counter(range(tasks)), iteration
    return [
        sorted({one["policy_version"] for one in rolled_out(log_path, n)}) for n in range(1, iterations + 1)
    ]


def test_roles_on_different_nodes_stay_apart(tmp_path: Path) -> None:
    """Node 0 leads and rolls out; only node 2 trains, so the programs of the update meet there."""
    flags = ("placement.rollout=node:0-1", "placement.update=node:2", "--iterations", "2")
    with Cluster(tmp_path, 3, *FAST, *flags) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
    assert versions(cluster.log_path, 2) == [[0], [1]]
    assert {one["node_rank"] for n in (1, 2) for one in rolled_out(cluster.log_path, n)} == {0, 1}


def test_the_next_iteration_is_rolled_out_while_the_update_trains(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, *FAST, *APART, "rollout.ahead=1", "--iterations", "4") as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
        events = cluster.events()
    assert versions(cluster.log_path, 4) == [[0], [0], [1], [2]]
    assert {one["node_rank"] for one in rolled_out(cluster.log_path, 3)} == {1, 2}
    adopted = [
        e["iteration"] for e in events if e["event"] == "parts_adopted" and e["phase_name"] == "train_assign"
    ]
    assert adopted == [2, 3, 4]


@pytest.mark.parametrize(("victim", "back"), [(1, False), (0, True)], ids=["a sampler", "the only trainer"])
def test_a_node_lost_in_the_update_loses_nothing_rolled_out_ahead(
    tmp_path: Path, victim: int, back: bool
) -> None:
    """Nothing that was rolled out ahead is lost or doubled. Without the only node that trains, the others wait for it."""
    with Cluster(
        tmp_path, 3, *FAST, "toy.phase_s=0.2", *APART, "rollout.ahead=1", "--iterations", "3"
    ) as cluster:
        cluster.start()
        cluster.in_phase(victim, 10, iteration=2)
        cluster.kill(victim)
        if back:
            lost = cluster.wait_for(lambda e: e["event"] == "node_lost" and e.get("waiting") is True)
            assert lost["lost"][0]["node_rank"] == victim
            cluster.start(victim)
        left = {rank: 0 for rank in range(3) if back or rank != victim}
        assert cluster.wait(*left) == left, cluster.said_by_all()
    assert versions(cluster.log_path, 3)[:2] == [[0], [0]]
    assert {version for (*found,) in versions(cluster.log_path, 3)[2:] for version in found} <= {1, 2}


def test_everything_killed_goes_on_with_what_was_rolled_out_ahead(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, 3, *FAST, "toy.phase_s=0.3", *APART, "rollout.ahead=1", "--iterations", "3"
    ) as cluster:
        cluster.start()
        cluster.in_phase(1, 10, iteration=1)
        ahead = RunPaths(cluster.log_path).part("train", 2, 1, 1, 1)
        until(lambda: ahead.exists() and ahead.stat().st_size > 1000, cluster.said_by_all)
        for rank in range(3):
            cluster.kill(rank)
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
    assert versions(cluster.log_path, 3) == [[0], [0], [1]]
    kept = [one for one in rolled_out(cluster.log_path, 2) if one["generation"] == 1]
    assert kept, "what the first session had rolled out ahead is used"


# --- admission ------------------------------------------------------------------------------------------------------------------

CARD = ("nvidia H100", 80 * GIB, 0)
NODE = Fingerprint(
    python="3.11.7",
    packages={"torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0"},
    driver="580.1",
    accelerators=[CARD] * 8,
    run_disk_free=10_000 * GIB,
)
# Of a model like Qwen2.5-7B.
PARAMETERS = 7_615_616_512


def found(*nodes: Fingerprint, parameters: int | None = PARAMETERS, **chosen: Any) -> list[Problem]:
    settings = resolve([], {"num_nodes": len(nodes), **chosen}, cross_checks=False)
    return check_nodes(dict(enumerate(nodes)), {rank: "abc"[rank] for rank in range(3)}, settings, parameters)


def only(*nodes: Fingerprint, **more: Any) -> Problem:
    (one,) = found(*nodes, **more)
    return one


def with_packages(**packages: str) -> Fingerprint:
    return replace(NODE, packages={**NODE.packages, **packages})


def test_nodes_that_are_alike_and_have_enough_are_admitted() -> None:
    assert found(NODE, NODE, NODE, expect_gpus=24) == []


def test_who_lacks_accelerators_is_named() -> None:
    few = replace(NODE, accelerators=[CARD] * 4)
    lacking, differing = found(NODE, few, NODE, expect_gpus=24)
    assert lacking.refused and not differing.refused
    assert str(lacking) == "refused  --expect-gpus 24       there are 20: node 1 (b) has 4 of 8"
    assert differing.found == "node 1 (b): 4 x nvidia H100 (80.0 GiB); the others: 8 x nvidia H100 (80.0 GiB)"
    assert found(NODE, few, NODE, expect_gpus=23)[0].found == "there are 20: node 1 (b) has 4 of 8"
    assert only(NODE, NODE, num_nodes=3, expect_gpus=24).found == "there are 16: node 2 is not there"


def test_processes_that_could_not_train_are_named() -> None:
    cpu = replace(NODE, accelerators=[])
    assert found(NODE, NODE, **{"trainer.shard": "node"}) == []
    assert found(cpu, cpu, **{"trainer.shard": "node", "trainer.processes_per_node": 2}) == []
    assert found(cpu, **{"trainer.shard": "node"}) == []
    one = only(cpu, cpu, **{"trainer.shard": "node"})
    assert one.refused and "node 0 has 1, node 1 has 1; set trainer.shard=all" in one.found
    one = only(NODE, **{"trainer.processes_per_node": 9})
    assert one.refused and one.found == "node 0 trains on 8 accelerators"
    assert found(NODE, **{"trainer.processes_per_node": 9, "trainer.command": "mine {out}"}) == []


@pytest.mark.parametrize(
    ("other", "what", "refused"),
    [
        (with_packages(torch="2.12.1"), "torch differs", True),
        (with_packages(torch="2.13.1"), "torch differs", False),
        (with_packages(vllm=""), "vllm differs", False),
        (with_packages(transformers="5.18.0"), "transformers differs", False),
        (replace(NODE, python="3.12.0"), "Python differs", False),
        (replace(NODE, driver="570.2"), "driver differs", False),
        (replace(NODE, accelerators=[], driver="580.1"), "what computes differs", True),
        (
            replace(NODE, accelerators=[*[CARD] * 7, ("nvidia H100", 80 * GIB, 12 * GIB)]),
            "in use by others",
            False,
        ),
        (replace(NODE, run_disk_free=200 * GIB), "room for checkpoints", False),
        (replace(NODE, run_disk_free=50 * GIB), "room for checkpoints", True),
    ],
)
def test_what_differs_or_is_too_little_is_told_by_its_weight(
    other: Fingerprint, what: str, refused: bool
) -> None:
    one = only(NODE, other, NODE)
    assert (one.what, one.refused) == (what, refused) and "node 1 (b)" in one.found
    # Nothing is trained in such a session, so that only what its rollouts need can end it.
    if what != "--expect-gpus":
        assert not any(each.refused for each in found(NODE, other, NODE, rl_phase="rollout"))


def test_only_a_session_that_starts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [Problem(True, "torch differs", "who: what"), Problem(False, "driver differs", "who: when")]
    monkeypatch.setattr(job_runner, "problems", lambda context: wrong)

    def admit(reason: str, rank: int = 0) -> Any:
        context = SimpleNamespace(generation=4, node_rank=rank, leader=0)
        runner = job_runner.JobRunner(cast(Any, None), cast(Any, None), lambda: None)
        node = SimpleNamespace(place=(SimpleNamespace(reason=reason, era=4), None))
        first = runner._admit(cast(Any, context), cast(Any, node))
        assert runner._admit(cast(Any, context), cast(Any, node)) == [], "once in an era"
        return first

    for reason in ("start", "start again"):
        with pytest.raises(
            NodesRefused, match=r"(?s)cannot carry this run: torch differs: who: what\nrefused .*\nwarning "
        ):
            admit(reason)
    assert [line["what"] for line in admit("node 2 (b) lost")] == ["torch differs", "driver differs"]
    assert admit("node 2 (b) lost", rank=1) == []


def test_a_node_tells_what_it_is(tmp_path: Path) -> None:
    mine = Fingerprint.collect(detect({}), {"model": "m"}, log_dir=tmp_path)
    assert mine.python.startswith("3.") and mine.packages["torch"] and mine.packages["vllm"]
    assert mine.run_disk_free > 0
    told = json.loads(json.dumps(mine.as_json()))
    assert Fingerprint.of({**told, "of a newer version": 1}).as_json() == told
    one = Fingerprint.collect([Accelerator(0, "nvidia", "H100", 80, 3)], {}, log_dir=tmp_path)
    assert one.accelerators == [("nvidia H100", 80, 3)]


def test_a_node_without_accelerators_does_not_begin_a_run_that_expects_some(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, "--iterations", "1", "--expect-gpus", "32") as cluster:
        cluster.env[0] = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
        cluster.start(0)
        assert cluster.wait() == {0: 2}
        said = "fsbarrier: error: --expect-gpus 32: this node has 0 accelerators\n"
        assert cluster.said(0).endswith(said) and not cluster.log_path.exists()


def test_nodes_that_differ_are_told_once(tmp_path: Path) -> None:
    metadata = tmp_path / "other" / "torch-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    with Cluster(tmp_path, 2, "--iterations", "2", "toy.phase_s=0.01", "toy.tasks=4") as cluster:
        paths = f"{tmp_path / 'other'}:{Path(__file__).parent.parent}"
        cluster.env[1] = {"PYTHONPATH": paths}
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        (told,) = [event for event in cluster.events() if event["event"] == "nodes_differ"]
        assert told["what"] == "torch differs" and "(" in told["found"] and ": 1.0" in told["found"]
