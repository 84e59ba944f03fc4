"""Rounds of further tasks where too few groups have rewards that differ: the files, two rollouts side by side, a node that dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, Cluster, rolled_out_twice
from test_rollout import SAMPLES, Fake, finish, make_spec, run, start
from waiting import until

from fsbarrier.protocol.assign import TaskSet, draw_rounds
from fsbarrier.rollouts.claims import Refills
from fsbarrier.trajectories import load, scan_rank_file


def node(folder: Path, rank: int, already: tuple[int, ...] = (0, 1, 0), enough: int = 6) -> Refills:
    return Refills(folder, rank, [0, 2], already, enough)


# --- the files --------------------------------------------------------------------------------------------------------


def test_all_nodes_decide_alike_on_another_round_whenever_they_look(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    first, other, late = node(folder, 0), node(folder, 2), node(folder, 2)
    first.report(0, 3)
    assert first.another_after(0) is None and other.another_after(0) is None
    other.report(0, 2)
    assert first.another_after(0) is True
    # 5, the 1 that was there before, and 2 more: enough. Who looks at round 0 only now finds too few, as the others did.
    first.report(1, 2)
    assert late.another_after(0) is True and late.another_after(1) is None
    other.report(1, 0)
    assert first.another_after(1) is False and late.another_after(1) is False
    assert (first.rounds_done(), late.rounds_done()) == (2, 2)


# --- rollouts -----------------------------------------------------------------------------------------------------------

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
        "tasks": shares[str(rank)],
        "shares": shares,
        "claims": str(folder / "claims"),
    }
    known |= {"keep": 2}
    known |= {"refills": {"rounds": [4, 4, 4], "with_signal": [0, 0, 0]}}
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
    changes = {"keep": keep, "refills": {"rounds": [4, 4, 4], "with_signal": already}}
    alone = in_rounds(
        tmp_path, fake.url, 1, **changes, tasks=[*range(12)], shares={"1": [*range(12)], "2": []}
    )
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
