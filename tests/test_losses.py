"""The losses against their formulas, worked out by hand or by another route."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


def test_grpo_loss_by_hand() -> None:
    import torch

    from fsbarrier.training.losses import grpo_loss

    old = torch.zeros(2, 2)
    new = torch.log(torch.tensor([[0.5, 1.0], [2.0, 1.1]]))
    mask = torch.tensor([[True, False], [True, True]])
    sums = grpo_loss(new, old, torch.tensor([-1.0, 1.0]), mask, clip_low=0.2, clip_high=0.28)
    # worse sample, ratio 0.5 -> bounded at 0.8; better sample, ratio 2 -> bounded at 1.28, ratio 1.1 within bounds
    assert float(sums.loss) == pytest.approx(0.8 - 1.28 - 1.1)
    assert int(sums.clipped) == 2


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    """Where nothing has moved yet, d loss / d log p is minus the advantage, and masked tokens get nothing."""
    import torch

    from fsbarrier.training.losses import grpo_loss

    old = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -0.7, -9.0]])
    new = old.clone().requires_grad_()
    mask = torch.tensor([[True, True, False], [True, True, False]])
    grpo_loss(new, old, torch.tensor([1.5, -0.5]), mask, clip_low=0.2, clip_high=0.28).loss.backward()
    assert new.grad is not None
    assert torch.allclose(new.grad, torch.tensor([[-1.5, -1.5, 0.0], [0.5, 0.5, 0.0]]))


def test_masked_tokens_cannot_spoil_the_loss() -> None:
    import torch

    from fsbarrier.training.losses import grpo_loss

    new = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1e9, -1.0]])  # a ratio of infinity, were it not masked
    sums = grpo_loss(
        new, old, torch.tensor([1.0]), torch.tensor([[False, True]]), clip_low=0.2, clip_high=0.28
    )
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-1.0)
    assert new.grad is not None and bool(torch.isfinite(new.grad).all())


def test_advantages_are_centred_and_scaled() -> None:
    import torch

    from fsbarrier.training.advantages import group_advantages

    assert group_advantages(torch.tensor([0.0, 1.0]), normalize_std=True).tolist() == pytest.approx(
        [-0.7071, 0.7071], abs=1e-4
    )
    assert group_advantages(torch.tensor([0.0, 0.0, 3.0]), normalize_std=False).tolist() == [-1, -1, 2]
    assert group_advantages(torch.tensor([1.0, 1.0]), normalize_std=True).tolist() == [0, 0]
    assert group_advantages(torch.tensor([1.0]), normalize_std=True).tolist() == [0]


def test_token_log_probs_are_those_of_the_tempered_distribution() -> None:
    import torch

    from fsbarrier.training.losses import token_log_probs

    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    found = token_log_probs(logits, tokens, 0.5)
    expected = torch.log_softmax(logits / 0.5, -1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    assert torch.allclose(found[:, 1:], expected, atol=1e-5) and bool((found[:, 0] == 0).all())


def test_rft_is_the_likelihood_of_what_is_weighted() -> None:
    import torch

    from fsbarrier.training.losses import rft_loss

    new = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert float(rft_loss(new, torch.tensor([1.0, 0.5]), mask).loss) == pytest.approx(1 + 2 + 1.5)


def test_an_old_trajectory_weighs_no_more_than_a_limit() -> None:
    """What the policy has come to like much more, and was bad, would else count without bounds."""
    import torch

    from fsbarrier.training.losses import MAX_RATIO, grpo_loss

    new = torch.tensor([[-0.1]], requires_grad=True)
    sums = grpo_loss(
        new,
        torch.tensor([[-9.0]]),
        torch.tensor([-1.0]),
        torch.ones(1, 1, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.28,
    )
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(MAX_RATIO) and new.grad is not None and new.grad.item() == 0.0
