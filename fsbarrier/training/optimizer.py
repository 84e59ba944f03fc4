"""The optimizer and its learning rate: AdamW, whose weight decay leaves norms and biases alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.nn import Parameter

from fsbarrier.settings.sections import OptimizerSettings


def make_optimizer(parameters: Iterable[Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Of those that are trained. A vector is a norm or a bias: pulling it to zero does not make the model simpler."""
    trained = [one for one in parameters if one.requires_grad]
    matrices = {"params": [one for one in trained if _dimensions(one) > 1]}
    vectors = {"params": [one for one in trained if _dimensions(one) <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW(
        [group for group in (matrices, vectors) if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _dimensions(parameter: Parameter) -> int:
    # DeepSpeed's ZeRO-3 keeps no more of a parameter itself than its name and, here, its shape.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def learning_rate_of(settings: OptimizerSettings, step: int) -> float:
    """Of the run's `step`-th optimizer step: rising evenly through the first `warmup_steps`, then by the schedule."""
    if step < settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant" or settings.decay_steps is None:
        return settings.lr
    falling = settings.decay_steps - settings.warmup_steps
    done = min(1.0, (step - settings.warmup_steps) / falling)
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)
