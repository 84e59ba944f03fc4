"""A model with AdamW using only PyTorch: gradients are all-reduced, clipped and applied.

An unsharded float32 model is not wrapped, and its gradients are all-reduced here once per step. Otherwise fully_shard is used
(sharding.py), even on a single process if only mixed precision is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from fsbarrier.settings.sections import OptimizerSettings
from fsbarrier.training import optimizer, sharding, trainer_state
from fsbarrier.training.policy_model import TokenModel
from fsbarrier.training.processes import Processes
from fsbarrier.training.sharding import Layout
from fsbarrier.training.slices import distinct

# Number of gradients that `_sum_gradients` puts into one all-reduce.
TOGETHER = 16


class TorchBackend:
    """`model` is the module to call; its parameters are DTensors if it is sharded, otherwise plain tensors.

    `trained`: the trainable parameters by name, in float32; `optimizer` has the moments of each.
    """

    def __init__(
        self, model: TokenModel, settings: OptimizerSettings, layout: Layout, processes: Processes
    ) -> None:
        self.model, self._processes, self._layout = model, processes, layout
        whole = layout.shards == 1 and processes.dtype is torch.float32 and layout.offload != "all"
        self._sharded = not whole
        if whole:
            model.to(processes.device)
        else:
            sharding.shard(model, layout, processes)
        self.optimizer = optimizer.make_optimizer(model.parameters(), settings)
        self.trained = {
            name: parameter for name, parameter in model.causal.named_parameters() if parameter.requires_grad
        }

    def weights(self) -> dict[str, Tensor]:
        """All weights of the model, under transformers' names."""
        return distinct(self.model.causal.state_dict(keep_vars=True))

    def state(self, optimizer_steps: int, *, without_weights: bool) -> trainer_state.TrainerState:
        """See TrainerState.of."""
        return trainer_state.TrainerState.of(
            self.trained, self.optimizer, optimizer_steps, without_weights=without_weights
        )

    def restore(self, folder: Path, policy_version: int) -> trainer_state.StateLayout:
        """See trainer_state.restore."""
        return trainer_state.restore(folder, self.trained, self.optimizer, policy_version)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate a micro-batch's gradients; after the `last` one they are the same on every process."""
        if isinstance(self.model, FSDPModule):
            if self._layout.shards == 1:
                self.model.set_requires_gradient_sync(last)
            else:
                # Full gradients would not fit: each process keeps its shard, and copies are all-reduced at the end.
                self.model.set_requires_all_reduce(last)
        loss.backward()
        if last and not self._sharded:
            self._sum_gradients()

    def _sum_gradients(self) -> None:
        if self._processes.world == 1:
            return
        gradients = list(_gradients(self.model.parameters()))
        for first in range(0, len(gradients), TOGETHER):
            bucket = gradients[first : first + TOGETHER]
            flat = self._processes.sum(torch.cat([gradient.flatten() for gradient in bucket]))
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(
                bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
            )

    def step(self, lr: float, largest_norm: float) -> float:
        """Apply and reset the gradients; returns their norm before clipping. A non-finite norm changes nothing."""
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest_norm)))
        if math.isfinite(norm):
            self._move_moments(self._device)
            optimizer.set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self._layout.offload == "optimizer":
            self._move_moments(torch.device("cpu"))
        return norm

    @property
    def _device(self) -> torch.device:
        """The device on which the optimizer computes. With offload=optimizer its state is there only during a step."""
        return torch.device("cpu") if self._layout.offload == "all" else self._processes.device

    def _move_moments(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if value.device != device:
                    state[name] = value.to(device)


def _gradients(parameters: Iterable[Parameter]) -> Iterator[Tensor]:
    """The gradient of every trained parameter; zeros if this process's tokens did not use it, because others' may have."""
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad


def whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered from its shards, which every process must call; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
