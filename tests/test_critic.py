"""The critic: advantages and losses against numbers worked out by hand and against verl's formulas, and its life in an update."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import bench, largest_difference, rollouts, tiny_model

from fsbarrier.settings.sections import AlgorithmSettings

pytestmark = pytest.mark.torch

# Five tokens of one trajectory, the last with a reward of 1; the KL's coefficient is 0.1.
VALUES = [0.5, 0.4, 0.6, 0.3, 0.7]
POLICY = [-1.0, -0.5, -2.0, -0.1, -0.7]
REFERENCE = [-1.1, -0.4, -1.5, -0.1, -0.9]
#: by gamma and lambda: returns, and the advantages before they are normalised and after
WORKED: dict[tuple[float, float], tuple[list[float], list[float], list[float]]] = {
    (1.0, 1.0): (
        [1.03, 1.04, 1.03, 0.98, 0.98],
        [0.53, 0.64, 0.43, 0.68, 0.28],
        [0.110845, 0.788233, -0.504962, 1.034556, -1.428673],
    ),
    (1.0, 0.95): (
        [0.934887, 0.973565, 0.9827, 0.966, 0.98],
        [0.434887, 0.573565, 0.3827, 0.666, 0.28],
        [-0.212220, 0.692114, -0.552535, 1.294892, -1.222252],
    ),
    (0.99, 0.95): (
        [0.900089, 0.946613, 0.964288, 0.95634, 0.98],
        [0.400089, 0.546613, 0.364288, 0.65634, 0.28],
        [-0.328002, 0.645331, -0.565826, 1.374234, -1.125737],
    ),
}


def weighed(
    mask: list[int], gamma: float, lam: float, *, whiten: bool, segments: tuple[int, ...] = ()
) -> Any:
    """The batch of one trajectory of a prompt of one token and these, whose segments begin at these tokens."""
    import torch

    from fsbarrier.training.advantages import with_token_weights
    from fsbarrier.training.batch import TrainingBatch

    offsets = [0, *segments, len(mask) + 1]
    sequences = len(offsets) - 1
    sampled = torch.tensor([0, *mask], dtype=torch.uint8)
    policy, reference, values = (torch.tensor([9.0, *one]) for one in (POLICY, REFERENCE, VALUES))
    continues = torch.arange(sequences).clamp(max=1)
    of_sequences = torch.ones(sequences), sampled, sampled, continues, torch.zeros(sequences)
    batch = TrainingBatch(sampled.int(), sampled, policy, torch.tensor(offsets), *of_sequences, ())
    batch = replace(batch, reference=reference, values=values)
    algorithm = AlgorithmSettings(
        advantage="gae", gamma=gamma, lam=lam, kl_in_reward=0.1, normalize_std=whiten
    )
    return with_token_weights(batch, algorithm, 0.1)[0]


@pytest.mark.parametrize(("gamma", "lam"), WORKED)
def test_advantages_are_the_worked_ones(gamma: float, lam: float) -> None:
    import torch

    returns, raw, whitened = WORKED[gamma, lam]
    found = weighed([1] * 5, gamma, lam, whiten=True)
    assert torch.allclose(found.token_weights[1:], torch.tensor(whitened), atol=2e-6)
    assert torch.allclose(found.returns[1:], torch.tensor(returns), atol=1e-6)
    assert torch.allclose((found.returns - found.values)[1:], torch.tensor(raw), atol=1e-6)
    assert not found.token_weights[0] and not found.returns[0]


def test_what_the_policy_did_not_sample_is_passed_over_and_a_segment_ends_nothing() -> None:
    import torch

    tool = weighed([1, 1, 0, 1, 1], 0.99, 0.95, whiten=False)
    worked = torch.tensor([0.379093, 0.524288, 0.0, 0.65634, 0.28])
    assert torch.allclose((tool.returns - tool.values)[[1, 2, 4, 5]], worked[[0, 1, 3, 4]], atol=1e-6)
    assert not tool.returns[3] and not tool.token_weights[3]
    # The same tokens in two segments, the observation being the second's prompt.
    apart = weighed([1, 1, 0, 1, 1], 0.99, 0.95, whiten=False, segments=(3,))
    assert torch.equal(apart.returns, tool.returns) and torch.equal(apart.token_weights, tool.token_weights)


def test_advantages_are_verls_on_any_batch() -> None:
    """Against verl's loop over padded rows, written anew in float64: rewards and values where the mask is 0 are passed over."""
    import torch

    from fsbarrier.training.advantages import gae

    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(20, 30, generator=generator) < 0.7
    mask[:, 0] = True
    values, rewards = (torch.randn(20, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    gamma, lam = 0.97, 0.9
    expected = torch.zeros_like(values)
    for row in range(20):
        after, running = 0.0, 0.0
        for column in reversed(range(30)):
            if mask[row, column]:
                error = float(rewards[row, column]) + gamma * after - float(values[row, column])
                running = error + gamma * lam * running
                after = float(values[row, column])
                expected[row, column] = running
    found = gae(rewards[mask], values[mask], mask.sum(1), gamma, lam)
    assert torch.allclose(found, expected[mask], atol=1e-12)


@pytest.mark.parametrize(
    ("clip", "value", "clipped", "first"),
    [(0.5, 0.14046379, 0.0, -0.000018), (0.2, 0.14446736, 1.0, 0.0), (None, 0.14046379, 0.0, -0.000018)],
)
def test_the_loss_of_values_is_the_worked_one(
    clip: float | None, value: float, clipped: float, first: float
) -> None:
    import torch

    from fsbarrier.training.losses import Divisor, value_loss

    new = torch.tensor([[0.9, 0.1, 1.3, 0.3, 0.6]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([WORKED[0.99, 0.95][0]], dtype=torch.float64)
    old, mask = torch.tensor([VALUES], dtype=torch.float64), torch.ones(1, 5, dtype=torch.bool)
    found = value_loss(clip, "token-mean", new, old, returns, mask, Divisor(5, 1, 5))
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(value, abs=1e-6)
    assert float(found.sums.value_clipped) == clipped
    assert new.grad is not None
    gradient = torch.tensor([[first, -0.169323, 0.067142, -0.131268, -0.076]], dtype=torch.float64)
    assert torch.allclose(new.grad, gradient, atol=1e-6)


def test_the_loss_of_the_policy_with_these_advantages_is_the_worked_one() -> None:
    import torch

    from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss

    ppo = AlgorithmSettings(advantage="gae", clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    new = torch.tensor([[-0.8, -0.6, -1.6, -0.1, -0.9]], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([POLICY], dtype=torch.float64), torch.tensor([WORKED[0.99, 0.95][2]])
    values, mask = TokenValues(new, old, old, torch.zeros_like(old)), torch.ones(1, 5, dtype=torch.bool)
    loss = minibatch_loss(ppo, values, advantages, mask, Divisor(5, 1, 5)).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.041651513, abs=1e-6)
    gradient = torch.tensor([[0.080125, -0.116784, 0.168823, -0.274847, 0.184335]], dtype=torch.float64)
    assert new.grad is not None and torch.allclose(new.grad, gradient, atol=1e-6)


def with_critic(folder: Path, **changes: Any) -> Any:
    work = bench(folder, algorithm__advantage="gae", critic__lr=1e-2, **changes)
    # The same rollouts are trained on again and again.
    work.nested["algorithm"]["max_logprob_gap"] = 99.0
    work.prepare()
    return work


def critic_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(folder / "critic" / "model" / "model.safetensors")
    return found


def test_a_critic_learns_what_is_to_come_and_is_saved_like_the_policy(tmp_path: Path) -> None:
    """Its folder is a token classifier of transformers; the next update goes on with it; a batch without any contrast teaches it too."""
    import torch
    from transformers import AutoModelForTokenClassification

    from fsbarrier.rundir import checkpoints

    work = with_critic(tmp_path)
    (tmp_path / "merged").unlink()
    rollouts(tmp_path / "merged", tiny_model(tmp_path / "model"), rewards=(1, 1, 1, 1))
    assert work.prepare()["dropped_groups"] == 0
    errors, before = [], ""
    for version in (1, 2, 3, 4):
        told = work.update(f"v{version}", version=version, before=before)
        before = f"v{version}"
        errors.append(told["value_loss"])
        assert checkpoints.verify(tmp_path / before).policy_version == version
        layout = json.loads((tmp_path / before / "critic" / "trainer" / "layout.json").read_text())
        assert layout["optimizer_steps"] == 4 * version
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.1 * errors[0]
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "v4" / "critic" / "model").eval()
    with torch.no_grad():
        values = critic(torch.randint(2, 32, (4, 8))).logits[:, 4:, 0]
    assert float((values - 1).abs().mean()) < 0.5


def test_a_critic_that_is_resumed_or_kept_goes_on_as_one_that_never_stopped(tmp_path: Path) -> None:
    from fsbarrier.workers.update import Updates, leave

    work, updates = with_critic(tmp_path), Updates()
    for version, before in ((1, ""), (2, "v1"), (3, "v2")):
        told = work.update_by(updates, f"v{version}", version=version, before=before)
        assert told["went_on"] is (version > 1)
    work.update("loaded", version=3, before="v2")
    assert largest_difference(critic_of(tmp_path / "v3"), critic_of(tmp_path / "loaded")) == 0
    assert largest_difference(critic_of(tmp_path / "v3"), critic_of(tmp_path / "v2")) > 1e-4
    assert largest_difference(work.weights("v3"), work.weights("loaded")) == 0
    leave()


def test_first_the_critic_alone_is_trained(tmp_path: Path) -> None:
    work = with_critic(tmp_path, critic__warmup=1)
    told = work.update("v1")
    assert told["optimizer_steps"] == 0 and "the critic alone" in told["note"] and told["critic_lr"] > 0
    again = work.update("v2", version=2, before="v1")
    assert again["optimizer_steps"] == 4 and again["note"] == ""
    assert largest_difference(work.weights("v1"), work.weights("v2")) > 1e-5
    assert again["lr"] == pytest.approx(work.settings.optimizer.lr), "its warm-up of 4 steps is just over"


def test_a_critic_may_begin_with_another_model(tmp_path: Path) -> None:
    """Such as another run's critic, whose head it keeps; a folder that lacks more than a head is refused."""
    from safetensors.torch import save_file

    from fsbarrier.errors import UsageError

    work = with_critic(tmp_path)
    work.update("v1")
    begun = tmp_path / "v1" / "critic" / "model"
    work.nested["critic"] |= {"model": str(begun), "lr": 1e-30}
    work.update("other")
    assert largest_difference(critic_of(tmp_path / "other"), critic_of(tmp_path / "v1")) == 0
    weights = critic_of(tmp_path / "v1")
    weights["score.weight"] = weights["score.weight"].expand(2, -1).contiguous()
    save_file(weights, begun / "model.safetensors", {"format": "pt"})
    work.update("anew")
    assert not critic_of(tmp_path / "anew")["score.weight"].abs().max() > 1e-20, "two outputs are no critic's"
    del weights["model.norm.weight"]
    save_file(weights, begun / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"it lacks model\.norm\.weight"):
        work.update("lacking")
