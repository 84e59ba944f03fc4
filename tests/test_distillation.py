"""On-policy distillation: a teacher's log-probabilities are taken in the rollout; its advantages are those of the reverse KL divergence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from complete_runs import Bench
from engine_bench import largest_gap, refusal, write_model

from fsbarrier.data.demo_tasks import DEMO_SETTINGS, FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.trajectories import load

pytestmark = pytest.mark.torch

OLD, TEACHER = [-1.0, -0.5, -2, -0.1, -0.7], [-0.8, -0.6, -3, -0.1, -0.3]


def batch_of(sampled: list[float], teacher: list[float], weight: float = 0.0, **more: Any) -> Any:
    """A sequence of a prompt token and what was sampled after it."""
    import torch

    from fsbarrier.training.batch import TrainingBatch

    count = 1 + len(sampled)
    return TrainingBatch(
        token_ids=torch.zeros(count, dtype=torch.int32),
        loss_mask=torch.tensor([0] + [1] * len(sampled), dtype=torch.uint8),
        logprobs=torch.tensor([0.0, *sampled]),
        offsets=torch.tensor([0, count]),
        weights=torch.tensor([weight]),
        current=torch.ones(1, dtype=torch.uint8),
        engines=torch.zeros(1, 2, dtype=torch.int32),
        continues=torch.zeros(1, dtype=torch.uint8),
        groups=torch.zeros(1, dtype=torch.int32),
        steps=(torch.tensor([0]),),
        teacher=torch.tensor([5.0, *teacher]),
        **more,
    )


def test_the_worked_numbers() -> None:
    """Of slime's form: the advantage t - o in a clipped loss. Outside the sampled tokens nothing counts."""
    import torch

    from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss
    from fsbarrier.training.token_advantages import with_distillation

    algorithm = AlgorithmSettings(loss="distil")
    batch = with_distillation(batch_of(OLD, TEACHER), algorithm)
    assert batch.token_weights.tolist() == pytest.approx([0, *(np.array(TEACHER) - np.array(OLD))])
    new = torch.tensor([[0.0, *OLD]], dtype=torch.float64, requires_grad=True)
    old = new.detach()
    values = TokenValues(new, old, old, torch.zeros_like(old))
    loss = minibatch_loss(
        algorithm, values, batch.token_weights[None], batch.loss_mask.bool()[None], Divisor(5, 1, 5)
    ).loss
    loss.backward()
    assert loss.item() == pytest.approx(0.1)
    assert new.grad is not None and new.grad[0].tolist() == pytest.approx([0, -0.04, 0.02, 0.2, 0, -0.08])


def test_it_is_added_to_what_the_reward_says() -> None:
    import torch

    from fsbarrier.training.token_advantages import with_distillation

    both = AlgorithmSettings(loss="distil", distil_reward=0.5)
    apart = np.array(TEACHER) - np.array(OLD)
    assert with_distillation(batch_of(OLD, TEACHER, 2.0), both).token_weights[1:].tolist() == pytest.approx(
        1 + apart
    )
    by_token = torch.tensor([9.0, 1, 2, 3, 4, 5])
    found = with_distillation(batch_of(OLD, TEACHER, 2.0, token_weights=by_token), both).token_weights
    assert found.tolist() == pytest.approx([0, *(np.array([0.5, 1, 1.5, 2, 2.5]) + apart)])
    # The policy is the trainer's own where that was computed.
    own = torch.tensor([0.0, *(np.array(OLD) - 1)])
    alone = with_distillation(batch_of(OLD, TEACHER, old=own), AlgorithmSettings(loss="distil"))
    assert alone.token_weights[1:].tolist() == pytest.approx(apart + 1)
    other = batch_of(OLD, TEACHER)
    assert with_distillation(other, AlgorithmSettings()) is other


def test_on_average_its_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    """Over all tokens that may be sampled, for one position of a small vocabulary, in float64."""
    import torch

    from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss

    torch.manual_seed(3)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    divergence = (student.exp() * (student - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    found = torch.zeros_like(expected)
    for token in range(7):
        new = student[token][None, None]
        old, entropy = new.detach(), torch.zeros(1, 1, dtype=torch.float64)
        weight, mask = teacher[token] - old, torch.ones(1, 1, dtype=torch.bool)
        values = TokenValues(new, old, old, entropy)
        loss = minibatch_loss(AlgorithmSettings(loss="distil"), values, weight, mask, Divisor(1, 1, 1)).loss
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += old.exp().item() * gradient
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_a_run_learns_from_a_teacher(bench: Bench, tmp_path: Path) -> None:
    """The stand-in's log-probability of a token is a hundredth of its id, negative. Groups with equal rewards teach too."""
    words = (
        "algorithm.loss=distil",
        "algorithm.distil_reward=0.5",
        f"engines.teacher.model={bench.model}",
    )
    words += ("engines.teacher.max_model_len=64", "engine.max_model_len=63", "reward.kind=numeric")
    ended = bench.run(tmp_path / "run", "--iterations", "1", *words).check()
    trajectories = load(RunPaths(tmp_path / "run").merged("train", 1))["trajectories"]
    apart = []
    for one in trajectories:
        ids, mask = (np.array(one[name]) for name in ("token_ids", "loss_mask"))
        assert np.array(one["teacher_logprobs"]) == pytest.approx(np.where(mask, -ids / 100, 0.0), abs=1e-6)
        apart += list((np.array(one["logprobs"]) + ids / 100)[mask == 1])
    (updated,) = ended.events("updated")
    assert updated["trajectories"] == 4 and updated["optimizer_steps"] > 0
    assert updated["teacher_kl"] == pytest.approx(np.mean(apart), abs=1e-4)
    tests = load(RunPaths(tmp_path / "run").merged("test", 1))["trajectories"]
    assert all("teacher_logprobs" not in one for one in tests)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "algorithm.loss=distil: requires a teacher; give engines.teacher.model"),
        (["engines.teacher.model=M"], "engines.teacher.max_model_len=2048: must be greater than engine.max_model_len=2048"),
        (["engines.teacher.model=M", "engine.max_model_len=500"], "engine.max_model_len=500: must be less than the 256 positions of"),
        (["engines.teacher.model=M", "rollout.temperature=0.7"], "rollout.temperature=0.7: must be 1 with algorithm.loss=distil"),
        (["engines.teacher.model=M", "rollout.max_refills=1"], "rollout.max_refills=1: no group is without signal"),
        (["engines.teacher.model=M", "algorithm.truncated=shape"], "algorithm.truncated=shape: changes the reward, which"),
        (["engines.teacher.model=M", "algorithm.self_certainty=1"], "algorithm.self_certainty=1: changes the reward"),
        (
            ["engines.teacher.model=M", "algorithm.kl_in_reward=0.1", "algorithm.normalize_std=false"],
            "algorithm.kl_in_reward=0.1: changes the reward",
        ),
        (["algorithm.loss=grpo", "algorithm.distil_reward=1"], "algorithm.distil_reward=1: requires algorithm.loss=distil"),
    ],
)  # fmt: skip
def test_a_mistake_ends_the_start(tmp_path: Path, words: list[str], said: str) -> None:
    write_model(tmp_path / "M", architectures=["Qwen2ForCausalLM"])
    (tmp_path / "M" / "tokenizer.json").write_text("{}")
    longer = (
        []
        if "2048" in said
        else ["engines.teacher.max_model_len=4096"]
        if "teacher.model" in str(words)
        else []
    )
    assert said in refusal(tmp_path, ["algorithm.loss=distil", *words, *longer])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trained_model_teaches_its_warm_start(tmp_path: Path) -> None:
    """The demo's model after its own training is the teacher of the one that it began as; no reward is learned from."""
    settings = [f"{name}={value}" for name, value in DEMO_SETTINGS.items() if name != "iterations"]
    with Cluster(tmp_path / "first", 1, "--iterations", "4", program="rl") as first:
        first.start()
        assert first.wait(deadline_s=800) == {0: 0}, first.said(0)
    words = (f"--data-path={FOLDER}", f"--model={FOLDER / 'model'}", "--iterations=2", *settings)
    words += ("algorithm.loss=distil", "engine.max_model_len=63", "engines.teacher.max_model_len=64")
    words += (f"engines.teacher.model={first.paths.served_model.resolve()}", "engines.teacher.dtype=float32")
    with Cluster(tmp_path / "second", 1, *words, program="rl") as second:
        second.start()
        assert second.wait(deadline_s=800) == {0: 0}, second.said(0)
    rewards = [event["reward_mean"] for event in second.events() if event["event"] == "evaluated"]
    apart = [event["teacher_kl"] for event in second.events() if event["event"] == "updated"]
    assert rewards[0] < 0.4 and rewards[-1] > rewards[0] + 0.2, rewards
    assert 0 < apart[1] < apart[0] / 2, apart
    # What the engine told of the teacher is what transformers computes.
    one = load(second.paths.merged("train", 1))["trajectories"][0]
    told = {**one, "logprobs": one["teacher_logprobs"]}
    assert largest_gap(first.paths.served_model, [told], 1.0) < 1e-4
