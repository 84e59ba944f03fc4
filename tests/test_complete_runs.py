"""Complete runs of the default program: evaluation, agents, trainers, recipes, schedules, and the same seeds in every run."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from commands import typed
from complete_runs import Bench

from fsbarrier.rundir.paths import RunPaths
from fsbarrier.trajectories import load

#: What a session runs of its iterations.
PARTS = {
    "both": (),
    "rollout": ("--rl-phase", "rollout"),
    "train-only": ("--rl-phase", "rollout", "--rollout-split", "train-only"),
    "eval-only": ("--rl-phase", "rollout", "--rollout-split", "eval-only"),
    "update": ("--rl-phase", "update"),
}
EVERY_DAY = {(0, 1), (2, 2)}


def report(log_path: Path) -> str:
    typed("report", "--log-path", log_path)
    return (log_path / "report.html").read_text()


CASES = [
    pytest.param(*case, marks=[] if (case[0], case[2]) in EVERY_DAY else [pytest.mark.slow])
    for case in product((0, 1, 2, 5), PARTS, (1, 2))
    # It would do nothing, and is refused.
    if case[:2] != (0, "eval-only")
]


@pytest.mark.torch
@pytest.mark.parametrize(("interval", "part", "last"), CASES)
def test_a_run_evaluates_when_it_says_so_and_goes_on_from_its_end(
    bench: Bench, tmp_path: Path, interval: int, part: str, last: int
) -> None:
    expected: list[int] = []
    for first, until in ((1, last), (last + 1, last + 1)):
        how = ("--eval-interval", str(interval), "--iterations", str(until))
        if part == "update":
            # There is nothing to train on until somebody has rolled out.
            bench.run(tmp_path / "run", *how, *PARTS["rollout"]).check()
        ended = bench.run(tmp_path / "run", *how, *PARTS[part]).check()
        expected += evaluated_policies(interval, part, range(first, until + 1))
    events = ended.events("evaluated")
    assert [event["policy_version"] for event in events] == expected
    iterations = [*range(1, last + 2)]
    trains, updates = part != "eval-only", part in ("both", "update")
    assert numbers(ended.events("rolled_out"), "iteration") == (iterations if trains else [])
    assert numbers(ended.events("updated"), "policy_version") == (iterations if updates else [])


def evaluated_policies(interval: int, part: str, iterations: range) -> list[int]:
    """The versions that one session evaluates: before the iterations that are due, and at its end what it has made."""
    due = [i for i in iterations if interval == 1 or (interval and i % interval == 1)]
    match part:
        case "both":
            return [i - 1 for i in due] + ([iterations[-1]] if interval else [])
        case "update":
            # Rolled out before each of the updates: by the session of the first iterations, and then by that of the last.
            return [0 if iterations[0] == 1 else i - 1 for i in due]
        case "train-only":
            return []
        case _:
            return [0 for _ in due]


def numbers(events: list[dict[str, Any]], name: str) -> list[int]:
    return [event[name] for event in events]


@pytest.mark.torch
def test_the_last_version_of_a_session_has_its_trainers_state(bench: Bench, tmp_path: Path) -> None:
    """So the next one goes on with it, however seldom it is saved."""
    for last in (2, 3):
        bench.run(tmp_path / "run", "--iterations", str(last), "checkpoint.trainer_every=50").check()
        found = [folder.parent.name[:13] for folder in (tmp_path / "run" / "checkpoints").glob("*/trainer")]
        assert f"policy-00000{last}"[:13] in found


TRAINER = """
import json, shutil, sys
from pathlib import Path
from fsbarrier.rundir.checkpoints import write_manifest
spec, model, out = json.loads(Path(sys.argv[1]).read_text()), *map(Path, sys.argv[2:4])
assert sys.argv[4:6] == ["0", "1"] and Path(sys.argv[6]).is_file()
before = Path(sys.argv[7] if len(sys.argv) > 7 else "/nowhere") / "updates"
shutil.copytree(model, out / "model")
(out / "trainer").mkdir()
(out / "trainer" / "updates").write_text((before.read_text() if before.exists() else "") + "x")
write_manifest(out, spec["new_policy_version"])
"""


@pytest.mark.torch
def test_a_trainer_of_the_users_own_makes_the_versions(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TRAINER)
    words = "{spec} {model} {out} {node_rank} {num_nodes} {batch} {trainer_state}"
    for last in (2, 3):
        ended = bench.run(
            tmp_path / "run",
            *("--iterations", str(last), f"trainer.command={sys.executable} {tmp_path / 'mine.py'} {words}"),
        ).check()
    assert numbers(ended.events("weights_published"), "policy_version") == [1, 2, 3]
    (newest,) = (tmp_path / "run" / "checkpoints").glob("policy-000003.*")
    assert (newest / "trainer" / "updates").read_text() == "xxx"


FAILING = """
class Fails:
    async def run(self, task, client):
        raise KeyError("the tool")

class Answers:
    async def run(self, task, client):
        await client.complete(task.prompt)

def reward(prompt, response, answer, metadata):
    raise KeyError("the score")
"""


@pytest.mark.torch
@pytest.mark.parametrize(("agent", "why"), [("Fails", "the tool"), ("Answers", "the score")])
def test_an_agent_or_its_reward_that_fails_too_often_ends_the_run(
    bench: Bench, tmp_path: Path, agent: str, why: str
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(FAILING)
    ended = bench.run(
        tmp_path / "run", f"rollout.agent={mine}:{agent}", f"reward.kind={mine}:reward", "rollout.tasks=4"
    )
    assert ended.codes == [4], ended.described()
    assert "rollout.max_error_share=0.1 allows" in ended.said and why in ended.said
    assert not ended.events("weights_published")


@pytest.mark.torch
def test_a_run_with_rollouts_ahead_trains_on_samples_one_version_old_and_says_so(
    bench: Bench, tmp_path: Path
) -> None:
    apart = ("placement.rollout=node:1", "placement.update=node:0", "rollout.ahead=1")
    ran = bench.run(tmp_path / "run", "--iterations", "3", *apart, nodes=2).check()
    assert [event["staleness"] for event in ran.events("batch_prepared")] == [0, 1, 1]
    assert [event["policy_version"] for event in ran.events("weights_published")] == [1, 2, 3]
    assert "policy versions between sampling and update, mean" in report(ran.log_path)


@pytest.mark.torch
@pytest.mark.parametrize("preset", ["rloo", "reinforce_plus_plus"])
def test_a_recipe_with_the_kl_in_the_reward_reaches_its_end(
    bench: Bench, tmp_path: Path, preset: str
) -> None:
    many = ("optimizer.lr=0.01", "optimizer.warmup_steps=0", "algorithm.max_logprob_gap=99")
    recipe = (f"algorithm.preset={preset}", "algorithm.old_logprobs=trainer")
    for weight in (0, 20):
        log_path = tmp_path / str(weight)
        ran = bench.run(
            log_path,
            "--iterations",
            "3",
            *recipe,
            f"algorithm.kl_in_reward={weight}",
            "algorithm.kl_coef=1e-9",
            *(("algorithm.kl_target=100",) if weight else ()),
            *many,
        ).check()
        assert [event["policy_version"] for event in ran.events("weights_published")] == [1, 2, 3]
        updates = ran.events("updated")
        assert updates[-1]["kl"] > 0
        if weight:
            assert updates[-1]["reward_kl"] != 0
            # Far below the target it falls with each update.
            coefficients = [event["reward_kl_coef"] for event in updates]
            assert coefficients == sorted(set(coefficients), reverse=True)
        else:
            assert "reward_kl" not in updates[-1]


@pytest.mark.torch
def test_ppo_with_a_critic_reaches_its_end_and_its_critic_is_exported(bench: Bench, tmp_path: Path) -> None:
    """Two nodes; the first update is the critic's alone; then another run begins with this one's critic."""
    ppo = ("algorithm.preset=ppo", "rollout.samples=1", "algorithm.max_logprob_gap=99", "critic.lr=0.001")
    ran = bench.run(tmp_path / "run", "--iterations", "2", *ppo, "critic.warmup=1", nodes=2).check()
    first, second = ran.events("updated")
    assert (first["optimizer_steps"], second["optimizer_steps"] > 0) == (0, True)
    assert 0 < second["value_loss"] < first["value_loss"]
    assert "loss of the critic" in report(ran.log_path)
    out, shown = tmp_path / "critic", bench.type(ran.log_path, "export", str(tmp_path / "critic"), "--critic")
    assert shown.check().said.startswith("exported critic of policy version 2")
    assert json.loads((out / "config.json").read_text())["architectures"][0].endswith(
        "ForTokenClassification"
    )
    more = ("algorithm.gamma=0.99", "algorithm.lam=0.95", "critic.clip=none", f"critic.model={out}")
    bench.run(tmp_path / "more", "--iterations", "1", *ppo, *more, "trainer.shard=all", nodes=2).check()


@pytest.mark.torch
def test_recover_finds_nothing_missing_in_a_finished_run_and_refuses_other_iterations(
    bench: Bench, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    bench.run(run, "--iterations", "1").check()
    # Iteration 2 has the evaluation with which the run ended.
    for iteration in ("1", "2"):
        shown = bench.type(run, "recover", "--iteration", iteration).check().said
        assert "missing" not in shown and "moved" not in shown and "complete" in shown
    refused = bench.type(run, "recover", "--iteration", "99")
    assert refused.codes == [2] and "it has files of iterations 1, 2" in refused.said
    (merged,) = (run / "test_trajectories").glob("*.iteration2.g*")
    merged.unlink()
    shown = bench.type(run, "recover", "--iteration", "2").check().said
    assert f"{merged.name} is missing, but the run needs it" in shown
    bench.type(run, "recover", "--iteration", "2", "--aggregate").check()
    assert merged.exists()


# --- updates that go on from each other -----------------------------------------------------------------------------------------


#: One optimizer step an update, whatever the rollouts were.
ONE_STEP = ("--eval-interval", "0", "trainer.minibatch=64", "algorithm.max_logprob_gap=100")


@pytest.mark.torch
@pytest.mark.parametrize("keep", ["process", "nothing"])
def test_a_schedule_of_learning_rates_goes_on_from_update_to_update(
    bench: Bench, tmp_path: Path, keep: str
) -> None:
    schedule = ("optimizer.lr=8e-6", "optimizer.warmup_steps=2", "optimizer.schedule=linear")
    more = (*ONE_STEP, *schedule, "optimizer.decay_steps=6")
    # The second session is a restart.
    for last in (2, 4):
        words = ("--iterations", str(last), f"trainer.keep={keep}")
        ended = bench.run(tmp_path / "run", *words, *more).check()
    rates = [event["lr"] for event in ended.events("updated")]
    assert rates == pytest.approx([4e-6, 8e-6, 6e-6, 4e-6])


@pytest.mark.torch
def test_replayed_samples_are_corrected_for_the_policy_that_sampled_them(
    bench: Bench, tmp_path: Path
) -> None:
    """In an update's only step this policy's own samples have the ratio 1, and so no divergence; those of an earlier policy have one."""

    def updates(name: str, recency: int) -> list[dict[str, Any]]:
        learning = ("optimizer.lr=0.03", "optimizer.warmup_steps=0", "algorithm.old_logprobs=trainer")
        iterations = ("--iterations", "2", f"update.recency={recency}")
        run = tmp_path / name
        # The second update is of a session of its own.
        bench.run(run, *ONE_STEP, *learning, "--iterations", "1", *iterations[2:]).check()
        return bench.run(run, *ONE_STEP, *learning, *iterations).check().events("updated")

    (first, own), (_, mixed) = updates("own", 1), updates("mixed", 2)
    assert own["replayed"] == 0 and mixed["replayed"] > 0
    assert first["policy_kl"] == pytest.approx(0, abs=1e-9) == own["policy_kl"]
    assert mixed["policy_kl"] > 1e-4


# --- reproducible ---------------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_each_task_of_each_iteration_has_a_seed_in_every_run(bench: Bench, tmp_path: Path) -> None:
    log = bench.folder / "fake" / "requests.jsonl"

    def seeds(run: str, *words: str) -> list[dict[str, int]]:
        before = log.stat().st_size if log.exists() else 0
        words = (
            "--iterations",
            "1",
            "rollout.tasks=3",
            "rollout.samples=3",
            "rollout.reproducible=true",
            *words,
        )
        bench.run(tmp_path / run, *words).check()
        with log.open() as stream:
            stream.seek(before)
            requests = [json.loads(line) for line in stream]
        # A server is also asked for the log-probabilities that the trainer knows.
        asked = [one for one in requests if one["path"] == "/v1/completions" and "prompt_logprobs" not in one]
        assert all(len(one["prompt"]) == 1 for one in asked)
        # Trained on, evaluated before that, and evaluated at the end.
        of_kinds = [[one for one in asked if one["n"] == n] for n in (3, 1)]
        return [{str(one["prompt"][0]): one["seed"] for one in kind} for kind in of_kinds]

    train, test = seeds("first")
    assert seeds("second") == [train, test] != seeds("other", "rollout.seed=1")
    assert len({*train.values(), *test.values()}) == len(train) + len(test) == 3 + 2


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_runs_of_the_demo_sample_and_learn_the_same(tmp_path: Path) -> None:
    """With the real vLLM on a CPU. How the tasks meet in a batch differs, so the last bits of log-probabilities may."""
    small = ("rollout.tasks=24", "rollout.samples=8", "trainer.minibatch=96", "rollout.reproducible=true")

    def run(name: str) -> list[list[dict[str, Any]]]:
        argv = [sys.executable, "-m", "fsbarrier", "run", "--log-path", str(tmp_path / name)]
        words = [*argv, "--iterations", "2", "--eval-interval", "0", *small]
        done = subprocess.run(words, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr
        files = [RunPaths(tmp_path / name).merged("train", iteration) for iteration in (1, 2)]
        return [[*load(file)["trajectories"]] for file in files]

    for one, other in zip(run("a"), run("b"), strict=True):
        for a, b in zip(one, other, strict=True):
            assert [*a["token_ids"]] == [*b["token_ids"]] and a["reward"] == b["reward"]
            assert [*a["logprobs"]] == pytest.approx([*b["logprobs"]], abs=1e-5)
