"""The optimizer and its learning rate: AdamW without weight decay on norms and biases.

`optimizer.kind=adamw_8bit` uses torchao (Dettmers et al. 2021, arXiv 2110.02861): moments of at least 4096 numbers are stored in eight
bits, in blocks of 256 with a common scale. On disk they are float32, so that any number of processes and either kind can resume. Loading
may not reproduce the same eight bits, so after a save the trainer continues with the values that a load would give.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from fsbarrier.settings.sections import OptimizerSettings


def make_optimizer(parameters: Iterable[Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """An optimizer for the trainable parameters. Vectors, i.e. norms and biases, get no weight decay."""
    trained = [one for one in parameters if one.requires_grad]
    matrices = {"params": [one for one in trained if _dimensions(one) > 1]}
    vectors = {"params": [one for one in trained if _dimensions(one) <= 1], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    known: Any = {"lr": settings.lr, "eps": settings.eps, "weight_decay": settings.weight_decay}
    if settings.kind == "adamw_8bit":
        from torchao.optim import AdamW8bit

        eight_bit: torch.optim.Optimizer = AdamW8bit(groups, betas=settings.betas, **known)
        return eight_bit
    return torch.optim.AdamW(groups, betas=settings.betas, fused=True, **known)


def step(optimizer: torch.optim.Optimizer, lr: float, device: torch.device) -> None:
    """Apply the gradients at this learning rate."""
    compiled = False
    for group in optimizer.param_groups:
        # torchao stores it in a tensor because it compiles its step.
        compiled = isinstance(group["lr"], Tensor)
        group["lr"] = group["lr"].fill_(lr) if compiled else lr
    # On a CPU, compiling needs a C++ compiler and takes a minute.
    eager = compiled and device.type == "cpu"
    with torch.compiler.set_stance("force_eager") if eager else nullcontext():
        optimizer.step()


def as_kept(optimizer: object, parameter: Parameter, name: str, moment: Tensor) -> Tensor:
    """Convert a float32 moment of `parameter` to the form this optimizer uses."""
    # torchao's internal function for an empty moment, which supports sharded parameters.
    empty = getattr(optimizer, "_new_buffer", None)
    if empty is None:
        return moment
    kept: Tensor = empty(parameter, name == "exp_avg")
    return kept.copy_(moment)


def in_eight_bits(moment: object) -> bool:
    """Whether a moment, sharded or not, is stored in eight bits."""
    return hasattr(moment.to_local() if isinstance(moment, DTensor) else moment, "codes")


def read_back(optimizer: torch.optim.Optimizer) -> None:
    """Round 8-bit moments to the values they will have after a save and load."""
    for state in optimizer.state.values():
        for moment in state.values():
            held = moment.to_local() if isinstance(moment, DTensor) else moment
            if in_eight_bits(held):
                held.copy_(held.dequantize())


def _dimensions(parameter: Parameter) -> int:
    # Under DeepSpeed's ZeRO-3 the parameter itself is empty; its shape is stored here.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def learning_rate_of(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of the run's `step`-th optimizer step: evenly more in the first `warmup_steps`, then by the schedule."""
    if step < settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant" or settings.decay_steps is None:
        return settings.lr
    falling = settings.decay_steps - settings.warmup_steps
    done = min(1.0, (step - settings.warmup_steps) / falling)
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)
