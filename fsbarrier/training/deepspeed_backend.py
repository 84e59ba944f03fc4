"""A policy with AdamW under DeepSpeed's ZeRO-1, 2 or 3; alternative to torch_backend (`trainer.backend=deepspeed`).

DeepSpeed averages gradients, but our losses are parts of a sum, so the loss is multiplied by the number of processes. ZeRO's flat
partitions are mapped back to parameter names, so the trainer state has the same format as that of the torch backend: any backend on
any number of processes can continue from it.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fsbarrier.errors import UsageError
from fsbarrier.settings import deepspeed_config
from fsbarrier.settings.sections import Settings
from fsbarrier.training import trainer_state
from fsbarrier.training.optimizer import make_optimizer
from fsbarrier.training.policy_model import PolicyModel
from fsbarrier.training.processes import Processes, gather_json
from fsbarrier.training.sharding import Layout
from fsbarrier.training.slices import FlatPart, distinct
from fsbarrier.training.stored_tensors import StoredTensors

MOMENTS = ("exp_avg", "exp_avg_sq")


def configuration(settings: Settings, processes: Processes) -> dict[str, Any]:
    """The configuration for DeepSpeed. Every process must call this. Raises UsageError."""
    file = settings.trainer.deepspeed
    given = deepspeed_config.read(file)
    if any(other != given for other in gather_json(given)):
        raise UsageError(f"trainer.deepspeed={file}: differs between nodes; use the same file on all nodes")
    return deepspeed_config.filled(given, settings, str(processes.dtype).removeprefix("torch."))


def layout_of(config: Mapping[str, Any], settings: Settings, processes: Processes) -> Layout:
    """Every ZeRO stage shards the optimizer state over all processes."""
    return Layout(processes.world, settings.trainer.offload, config[deepspeed_config.ZERO]["stage"])


@dataclass(frozen=True, slots=True)
class _Fragment:
    """This process's part of a parameter: a range of a flat partition, from `offset` on."""

    flat: Parameter
    offset: int
    part: FlatPart


@dataclass
class _FlatMoments:
    """Adapter for the optimizer, which only has flat partitions: maps a part of a parameter to the same part of its moments."""

    state: dict[FlatPart, dict[str, Any]] = field(default_factory=dict)


class DeepSpeedBackend:
    """See TorchBackend. `model`: DeepSpeed's engine around the policy. `folder`: the policy's weights."""

    def __init__(
        self,
        model: PolicyModel,
        settings: Settings,
        config: dict[str, Any],
        processes: Processes,
        folder: Path,
    ) -> None:
        deepspeed = _deepspeed()
        self._policy, self._processes = model, processes
        self._stage = config[deepspeed_config.ZERO]["stage"]
        # DeepSpeed reads torchrun's environment variables, which a single process does not have.
        for name in ("LOCAL_RANK", "RANK"):
            os.environ.setdefault(name, "0")
        if any(one.is_meta for one in model.parameters()):
            _partition(model, config, processes)
            with StoredTensors.of_model(folder) as stored, torch.no_grad():
                for name, one in model.causal.named_parameters():
                    stored.fill(name, self._served(one))
        self._adamw = make_optimizer(model.parameters(), settings.optimizer)
        groups = {
            id(one): number
            for number, group in enumerate(self._adamw.param_groups)
            for one in group["params"]
        }
        names = {name: one for name, one in model.causal.named_parameters() if one.requires_grad}
        try:
            self.model, *_ = deepspeed.initialize(
                model=model, optimizer=self._adamw, config=config, dist_init_required=False
            )
        except (ValueError, AssertionError) as error:
            # Validation errors, for example from pydantic, may have several lines.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise UsageError(
                f"trainer.deepspeed={settings.trainer.deepspeed}: {' '.join(lines[:3])}"
            ) from None
        self._fragments = {name: self._fragment(one, groups[id(one)]) for name, one in names.items()}
        self.trained = {name: one.part for name, one in self._fragments.items()}
        if processes.dtype is not torch.float32:
            self._fill_exactly(folder)

    def _fill_exactly(self, folder: Path) -> None:
        """DeepSpeed makes its float32 weights from those that it computes with, which are less exact than the folder's may be."""
        with StoredTensors.of_model(folder) as stored, torch.no_grad():
            if all(stored.shapes.get(name) == part.shape for name, part in self.trained.items()):
                for name, part in self.trained.items():
                    stored.fill(name, part)

    def _fragment(self, parameter: Parameter, group: int) -> _Fragment:
        zero, shape = self.model.optimizer, tuple(getattr(parameter, "ds_shape", parameter.shape))
        if self._stage == 3:
            number, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            flat = zero.fp32_partitioned_groups_flat[number]
            served = self._served(parameter)
            start, size = served.start, len(served.data)
        else:
            flat = self._adamw.param_groups[group]["params"][0]
            mapping = parameter._hp_mapping
            # A partition ends somewhere in a parameter, and has nothing of most.
            offset, start, size = 0, 0, 0
            if mapping is not None:
                offset, start = mapping.hp_fragment_address.start, mapping.lp_fragment_address.start
                size = mapping.hp_fragment_address.numel
        return _Fragment(flat, offset, FlatPart(shape, start, flat.detach()[offset : offset + size]))

    def _served(self, parameter: Parameter) -> Any:
        """Of a parameter that the policy computes with, what this process holds: all, but for ZeRO-3."""
        if not hasattr(parameter, "ds_tensor"):
            return parameter
        held, whole = parameter.ds_tensor.numel(), math.prod(parameter.ds_shape)
        start = min(whole, held * self._processes.rank)
        return FlatPart(
            tuple(parameter.ds_shape), start, parameter.ds_tensor.detach()[: max(0, min(held, whole - start))]
        )

    def weights(self) -> dict[str, Any]:
        """All weights of the model, under transformers' names."""
        held = distinct(self._policy.causal.state_dict(keep_vars=True))
        return {name: self._served(one) for name, one in held.items()}

    @property
    def optimizer(self) -> _FlatMoments:
        """The moments of `trained`, as views of the real optimizer's tensors; none before the first step."""
        found = _FlatMoments()
        for one in self._fragments.values():
            state = self._adamw.state.get(one.flat, {})
            if state:
                end = one.offset + len(one.part.data)
                moments = {
                    key: FlatPart(one.part.shape, one.part.start, state[key][one.offset : end])
                    for key in MOMENTS
                }
                found.state[one.part] = {"step": state["step"], **moments}
        return found

    def restore(self, folder: Path, policy_version: int) -> trainer_state.StateLayout:
        """See trainer_state.restore."""
        for flat in self._flats():
            zeros = {key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS}
            self._adamw.state[flat] = {"step": torch.zeros((), device=flat.device), **zeros}
        optimizer = self.optimizer
        found = trainer_state.restore(folder, self.trained, optimizer, policy_version)
        for one in self._fragments.values():
            self._adamw.state[one.flat]["step"] = optimizer.state[one.part]["step"]
        return found

    def _flats(self) -> Iterator[Parameter]:
        yield from {id(one.flat): one.flat for one in self._fragments.values()}.values()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate a micro-batch's gradients."""
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self._processes.world)

    def step(self, lr: float, largest_norm: float) -> float:
        """Apply and reset the gradients, clipped according to the configuration; returns their norm before clipping.

        A non-finite norm changes nothing.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self.model.step()
        return float(self.model.get_global_grad_norm()) if self.model.was_step_applied() else math.nan


def _deepspeed() -> Any:
    """The package, which says what it does only where something is wrong."""
    try:
        import deepspeed
    except ImportError:
        raise UsageError(
            "trainer.backend=deepspeed: needs the package deepspeed, which is not installed here"
        ) from None
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # DeepSpeed calls functions for which torch has newer names, and torch would warn at each step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # On CPUs it would compile this when it is first used, which takes minutes and a C++ compiler, to talk within a machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _partition(model: PolicyModel, config: dict[str, Any], processes: Processes) -> None:
    """Give each parameter on the device "meta" memory, for as long as DeepSpeed takes to cut it up: never more than one is whole."""
    deepspeed, made = _deepspeed(), dict[int, Parameter]()
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is None or not one.is_meta:
                continue
            if id(one) not in made:
                whole = Parameter(torch.zeros(one.shape, dtype=processes.dtype, device=processes.device))
                if not made:
                    deepspeed.zero.Init(
                        module=torch.nn.ParameterList([whole]),
                        config_dict_or_path=config,
                        dtype=processes.dtype,
                    )
                else:
                    next(iter(made.values())).convert_to_zero_parameters(param_list=[whole])
                made[id(one)] = whole
            module._parameters[name] = made[id(one)]
