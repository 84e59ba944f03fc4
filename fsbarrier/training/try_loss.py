"""Tries a user's own loss on two short sequences before a run starts, with its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.training.own_loss import load_loss

#: the numbers of tokens of the two sequences
LENGTHS = [3, 2]
GIVEN = {
    "new": [[-0.5, -1.2, -2.0], [-0.9, -0.4, 0.0]],
    "old": [[-0.6, -1.3, -1.9], [-0.95, -0.35, 0.0]],
    "engine": [[-0.65, -1.4, -1.8], [-1.1, -0.3, 0.0]],
    "reference": [[-0.7, -1.0, -1.8], [-1.1, -0.6, 0.0]],
    "entropy": [[1.1, 0.7, 0.9], [0.8, 1.2, 0.0]],
    "advantages": [[1.0, 1.0, 1.0], [-0.5, -0.5, 0.0]],
}


def try_loss(algorithm: AlgorithmSettings) -> None:
    """Raises UsageError if the function in `algorithm.loss` cannot be trained with."""
    setting = f"algorithm.loss={algorithm.loss}"
    value, gradient = measured(algorithm, [0, 1])
    if not torch.isfinite(torch.cat([value, gradient.flatten()])).all():
        raise UsageError(f"{setting}: its loss, or its gradient, is not finite")
    if not gradient.any():
        raise UsageError(f"{setting}: its loss has no gradient; compute it from `new`, which is the policy's")
    values, gradients = zip(*(measured(algorithm, [row]) for row in (0, 1)), strict=True)
    if not near(value, torch.stack(values).sum(0)) or not near(gradient, torch.cat(gradients)):
        raise UsageError(
            f"{setting}: the loss of a sequence depends on what is beside it, but a minibatch is split into parts whose losses are added; "
            "make the loss of each token of its own sequence"
        )


def near(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-5))


def measured(algorithm: AlgorithmSettings, rows: list[int]) -> tuple[Tensor, Tensor]:
    """The sum of these sequences' losses, [1], and its gradients to `new` and `entropy`, [sequences, 2, 3]."""
    longest = max(LENGTHS[row] for row in rows)
    mask = torch.arange(longest) < torch.tensor([LENGTHS[row] for row in rows])[:, None]
    given = {name: torch.tensor(values)[rows, :longest] for name, values in GIVEN.items()}
    learned = [given[name].requires_grad_() for name in ("new", "entropy")]
    # An update passes zeros outside the mask.
    given = {name: torch.where(mask, values, 0.0) for name, values in given.items()}
    refers = algorithm.kl_coef or algorithm.kl_in_reward
    loss = load_loss(algorithm.loss)(**given | ({} if refers else {"reference": None}), mask=mask)[mask].sum()
    if loss.requires_grad:
        loss.backward()
    gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in learned]
    padded = [torch.nn.functional.pad(tensor, (0, max(LENGTHS) - longest)) for tensor in gradients]
    return loss.detach()[None], torch.stack(padded, 1)
