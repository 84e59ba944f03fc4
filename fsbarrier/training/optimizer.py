"""Makes the optimizer and computes its learning rate: AdamW without weight decay on norms and biases."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.nn import Parameter

from fsbarrier.settings.sections import OptimizerSettings


def make_optimizer(parameters: Iterable[Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """An optimizer for the trainable parameters. Vectors, i.e. norms and biases, get no weight decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = {"params": [parameter for parameter in trained if _dimensions(parameter) > 1]}
    vectors = {
        "params": [parameter for parameter in trained if _dimensions(parameter) <= 1],
        "weight_decay": 0.0,
    }
    groups = [group for group in (matrices, vectors) if group["params"]]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _dimensions(parameter: Parameter) -> int:
    # Under DeepSpeed's ZeRO-3 the parameter itself is empty; its shape is stored here.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def learning_rate_of(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of the run's `step`-th optimizer step: it rises linearly for `warmup_steps`, then follows the schedule."""
    if step < settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant" or settings.decay_steps is None:
        return settings.lr
    falling = settings.decay_steps - settings.warmup_steps
    done = min(1.0, (step - settings.warmup_steps) / falling)
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * left
