"""Tries a user's own loss on two short sequences before a run starts: through the same sums as in an update, with its gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss

#: of two sequences with three and two tokens
NEW = [[-0.5, -1.2, -2.0], [-0.9, -0.4, 0.0]]
OLD = [[-0.6, -1.3, -1.9], [-0.95, -0.35, 0.0]]
ENGINE = [[-0.65, -1.4, -1.8], [-1.1, -0.3, 0.0]]
REFERENCE = [[-0.7, -1.0, -1.8], [-1.1, -0.6, 0.0]]
ENTROPY = [[1.1, 0.7, 0.9], [0.8, 1.2, 0.0]]
ADVANTAGES = [1.0, -0.5]
LENGTHS = [3, 2]


def try_loss(algorithm: AlgorithmSettings) -> None:
    """Raises UsageError if the function in `algorithm.loss` cannot be trained with."""
    said = f"algorithm.loss={algorithm.loss}"
    value, gradient = measured(algorithm, [0, 1])
    if not torch.isfinite(torch.cat([value, gradient.flatten()])).all():
        raise UsageError(f"{said}: its loss, or its gradient, is not finite")
    if not gradient.any():
        raise UsageError(f"{said}: its loss has no gradient; compute it from `new`, which is the policy's")
    values, gradients = zip(*(measured(algorithm, [row]) for row in (0, 1)), strict=True)
    if not near(value, torch.stack(values).sum(0)) or not near(gradient, torch.cat(gradients)):
        raise UsageError(
            f"{said}: the loss of a sequence depends on what is beside it, but a minibatch is split into parts whose losses are added; "
            "make the loss of each token of its own sequence"
        )


def near(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-5))


def measured(algorithm: AlgorithmSettings, rows: list[int]) -> tuple[Tensor, Tensor]:
    """The part of these sequences in a minibatch's loss, [1], and its gradients to `new` and `entropy`, [sequences, 2, 3]."""
    longest = max(LENGTHS[row] for row in rows)
    new, old, engine, reference, entropy = (
        torch.tensor(one)[rows, :longest] for one in (NEW, OLD, ENGINE, REFERENCE, ENTROPY)
    )
    learned = new.requires_grad_(), entropy.requires_grad_()
    mask = torch.arange(longest) < torch.tensor([LENGTHS[row] for row in rows])[:, None]
    values = TokenValues(
        new, old, engine, entropy, reference if algorithm.kl_coef or algorithm.kl_in_reward else None
    )
    # Only the user's own part: the KL and the entropy have gradients in any case.
    alone = replace(algorithm, kl_coef=0.0, entropy_coef=0.0)
    weights = torch.tensor([ADVANTAGES[row] for row in rows])
    loss = minibatch_loss(
        alone, values, weights, mask, Divisor(sum(LENGTHS), len(LENGTHS), max(LENGTHS))
    ).loss
    if loss.requires_grad:
        loss.backward()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in learned]
    padded = [torch.nn.functional.pad(one, (0, max(LENGTHS) - longest)) for one in gradients]
    return loss.detach()[None], torch.stack(padded, 1)
