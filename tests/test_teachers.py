"""Learning without rewards: from a teacher, and from the policy's own certainty."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from complete_runs import VOCABULARY, Bench
from engine_bench import largest_gap, refusal, write_model
from trainer_bench import bench as bench_of_updates

from fsbarrier.data.demo_tasks import DEMO_SETTINGS, FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.trajectories import iter_trajectories, load

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


def test_distillation_gives_the_numbers_worked_by_hand() -> None:
    """Of slime's form: the advantage t - o in a clipped loss. Outside the sampled tokens nothing counts."""
    import torch

    from fsbarrier.training.advantages import with_distillation
    from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss

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

    from fsbarrier.training.advantages import with_distillation

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


# --- self-certainty -------------------------------------------------------------------------------------------------------------


#: four tokens and four entries of the vocabulary; the mean over all logits is not over the sampled token
LOGITS = [[2.0, 0, -1, 1], [0, 0, 0, 0], [5, 0, 0, 0], [1, 1, -2, 0]]
#: the KL divergence of the uniform distribution from softmax(logits / temperature), worked out by hand in float64
EXPECTED = {1.0: [0.553895, 0, 2.383718, 0.496508], 0.7: [1.027237, 0, 3.973217, 0.854724]}


@pytest.mark.parametrize("temperature", EXPECTED)
@pytest.mark.parametrize("bytes_at_once", [1, 1 << 20])
@pytest.mark.parametrize("banned", [(), (4,)])
def test_it_is_the_worked_numbers(temperature: float, bytes_at_once: int, banned: tuple[int, ...]) -> None:
    """A token that is never sampled, such as an image's place, does not count as one of the vocabulary."""
    import torch

    from fsbarrier.training.log_prob_head import NEVER, LogitScaling, LogProbHead
    from fsbarrier.training.losses import token_log_probs

    linear = torch.nn.Linear(4, 4 + len(banned), bias=False)
    linear.weight.data.copy_(torch.eye(5)[: 4 + len(banned), :4])
    hidden = torch.tensor(LOGITS, requires_grad=True)
    head = LogProbHead(linear, LogitScaling(), bytes_at_once, banned)
    chosen, entropies, found = head(hidden, torch.tensor([0, 1, 2, 3]), temperature)
    assert found.tolist() == pytest.approx(EXPECTED[temperature], abs=1e-6) and not found.requires_grad
    # The gradients of the other two are there all the same.
    (chosen.sum() + entropies.sum()).backward()
    assert bool((hidden.grad != 0).any())
    # Logits predict the next token, so position 0 has none.
    whole = torch.tensor([[[*one, *[NEVER] * len(banned)] for one in (*LOGITS, [9.0] * 4)]])
    tokens = torch.tensor([[0, 0, 1, 2, 3]])
    assert token_log_probs(whole, tokens, temperature)[2].tolist()[0] == pytest.approx(
        [0, *EXPECTED[temperature]], abs=1e-6
    )


def certain_batch(certainty: list[list[float]], groups: list[int], rewards: list[float], **more: Any) -> Any:
    """A prompt token, and the tokens that were sampled after it, of each sequence."""
    import torch

    from fsbarrier.training.batch import TrainingBatch

    lengths = torch.tensor([0, *(1 + len(one) for one in certainty)])
    mask = torch.cat([torch.tensor([0] + [1] * len(one), dtype=torch.uint8) for one in certainty])
    zeros, count = torch.zeros(len(mask)), len(groups)
    return TrainingBatch(
        token_ids=torch.zeros(len(mask), dtype=torch.int32),
        loss_mask=mask,
        logprobs=zeros,
        offsets=lengths.cumsum(0),
        weights=torch.tensor(rewards),
        current=torch.ones(count, dtype=torch.uint8),
        engines=torch.full((count, 2), -1, dtype=torch.int32),
        continues=torch.tensor(more.get("continues", [0] * count), dtype=torch.uint8),
        groups=torch.tensor(groups, dtype=torch.int32),
        steps=(),
        # What stands at a prompt is of no account.
        certainty=torch.cat([torch.tensor([99.0, *one]) for one in certainty]),
    )


def weights(batch: Any, **algorithm: Any) -> list[float]:
    from fsbarrier.training.advantages import with_self_certainty

    settings = AlgorithmSettings(**{"self_certainty": 1.0, **algorithm})
    found: list[float] = with_self_certainty(batch, settings).weights.tolist()
    return found


def test_the_mean_over_an_answers_tokens_is_its_reward() -> None:
    """Group rewards 1.2, 1.5, 0.9, 1.2, then a second group; the run's own rewards would say something else."""
    certainty = [[1.2], [1.0, 2.0], [0.4, 0.9, 1.4], [1.2, 1.2], [3.0], [1.0]]
    batch = certain_batch(certainty, [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 5])
    expected = [0, 1.224740, -1.224740, 0]
    assert weights(batch) == pytest.approx([*expected, 2**-0.5, -(2**-0.5)], abs=1e-5)
    # A half of each: 0.6, 0.75, 0.95, 1.1 in the first group.
    centred = [-0.25, -0.1, 0.1, 0.25]
    assert weights(batch, self_certainty=0.5, normalize_std=False)[:4] == pytest.approx(centred, abs=1e-6)
    # The two segments of the second answer are one answer, with 2, 3 and 7 as its tokens.
    segments = certain_batch([[1.0], [2.0, 3.0], [7.0]], [0, 0, 0], [0, 0, 0], continues=[0, 0, 1])
    assert weights(segments, normalize_std=False) == pytest.approx([-1.5, 1.5, 1.5])
    assert weights(replace(batch, certainty=None)) == [0, 0, 1, 1, 0, 5]


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_batch_level_baseline_is_over_tokens(advantage: str) -> None:
    import torch

    batch = certain_batch([[1.0], [2.0, 2.0, 2.0], [4.0], [3.0]], [0, 0, 1, 1], [0.0] * 4)
    rewards = torch.tensor([1.0, 2, 4, 3], dtype=torch.float64)
    if advantage.endswith("baseline"):
        rewards -= torch.tensor([1.5, 1.5, 3.5, 3.5])
    of_tokens = rewards[[0, 1, 1, 1, 2, 3]]
    expected = (rewards - of_tokens.mean()) / of_tokens.std()
    assert weights(batch, advantage=advantage) == pytest.approx(expected.tolist(), abs=1e-5)


def test_an_update_makes_its_advantages_of_it(tmp_path: Path) -> None:
    """One step: the ratio is 1, so the loss is the negative mean of the tokens' advantages, here from transformers' logits in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    chosen = {"algorithm__self_certainty": 0.75, "trainer__epochs": 1, "trainer__minibatch": 99}
    work = bench_of_updates(tmp_path, rollout__temperature=1.0, **chosen)
    assert work.prepare()["dropped_groups"] == 0
    found = work.update("out")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    certainties, rewards, counts = [], [], []
    for item in iter_trajectories(tmp_path / "merged"):
        tokens, mask = torch.tensor([[*item["token_ids"]]]), torch.tensor([*item["loss_mask"]]).bool()
        with torch.no_grad():
            logits = policy(tokens).logits[0, :-1][mask[1:]]
        divergence = logits.logsumexp(1) - logits.mean(1) - log(logits.shape[1])
        certainties.append(divergence)
        rewards.append(0.25 * item["reward"] + 0.75 * float(divergence.mean()))
        counts.append(len(divergence))
    groups = torch.tensor(rewards).view(-1, 4)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    of_tokens = advantages.flatten().repeat_interleave(torch.tensor(counts))
    assert found["loss"] == pytest.approx(-float(of_tokens.mean()), abs=1e-6) and abs(found["loss"]) > 1e-4
    assert found["self_certainty"] == pytest.approx(float(torch.cat(certainties).mean()), abs=1e-6)


def test_a_run_is_trained_on_it_alone_and_tells_of_its_rewards(bench: Bench, tmp_path: Path) -> None:
    """The first policy says that each token is as probable as any other, so there is nothing to learn from and nothing to lose."""
    words = ("--iterations", "1", "--eval-interval", "0", "algorithm.self_certainty=1", "rollout.tasks=4")
    ended = bench.run(tmp_path / "run", *words, "algorithm.kl_in_reward=0").check()
    (updated,), (prepared,), (rolled_out,) = (
        ended.events(name) for name in ("updated", "batch_prepared", "rolled_out")
    )
    assert updated["self_certainty"] == pytest.approx(0, abs=1e-6) and abs(log(VOCABULARY)) > 4
    assert prepared["dropped_groups"] == 0 and updated["trajectories"] == rolled_out["trajectories"]
    assert updated["grad_norm"] == pytest.approx(0, abs=1e-3) and rolled_out["reward_mean"] >= 0
