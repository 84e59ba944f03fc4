"""Before anything is loaded: whether the nodes fit together and have what the run needs, from what each told when it joined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cluster import Cluster

from fsbarrier.engine.accelerators import Accelerator, detect
from fsbarrier.errors import NodesRefused
from fsbarrier.run import job_runner
from fsbarrier.run.admission import GIB, Problem, check_nodes
from fsbarrier.run.fingerprint import Fingerprint
from fsbarrier.settings.resolve import resolve

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
