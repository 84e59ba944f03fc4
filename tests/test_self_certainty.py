"""Self-certainty as the reward: the worked numbers, by way of whole logits and of slices, and the advantages that are made of it."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from complete_runs import VOCABULARY, Bench
from trainer_bench import bench as bench_of_updates

from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.trajectories import iter_trajectories

pytestmark = pytest.mark.torch

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


def batch_of(certainty: list[list[float]], groups: list[int], rewards: list[float], **more: Any) -> Any:
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
    from fsbarrier.training.token_advantages import with_self_certainty

    settings = AlgorithmSettings(**{"self_certainty": 1.0, **algorithm})
    found: list[float] = with_self_certainty(batch, settings).weights.tolist()
    return found


def test_the_mean_over_an_answers_tokens_is_its_reward() -> None:
    """Group rewards 1.2, 1.5, 0.9, 1.2, then a second group; the run's own rewards would say something else."""
    certainty = [[1.2], [1.0, 2.0], [0.4, 0.9, 1.4], [1.2, 1.2], [3.0], [1.0]]
    batch = batch_of(certainty, [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 5])
    expected = [0, 1.224740, -1.224740, 0]
    assert weights(batch) == pytest.approx([*expected, 2**-0.5, -(2**-0.5)], abs=1e-5)
    # A half of each: 0.6, 0.75, 0.95, 1.1 in the first group.
    centred = [-0.25, -0.1, 0.1, 0.25]
    assert weights(batch, self_certainty=0.5, normalize_std=False)[:4] == pytest.approx(centred, abs=1e-6)
    # The two segments of the second answer are one answer, with 2, 3 and 7 as its tokens.
    segments = batch_of([[1.0], [2.0, 3.0], [7.0]], [0, 0, 0], [0, 0, 0], continues=[0, 0, 1])
    assert weights(segments, normalize_std=False) == pytest.approx([-1.5, 1.5, 1.5])
    assert weights(replace(batch, certainty=None)) == [0, 0, 1, 1, 0, 5]


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_batch_level_baseline_is_over_tokens(advantage: str) -> None:
    import torch

    batch = batch_of([[1.0], [2.0, 2.0, 2.0], [4.0], [3.0]], [0, 0, 1, 1], [0.0] * 4)
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
