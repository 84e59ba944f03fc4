"""A policy with AdamW under DeepSpeed's ZeRO-1, 2 or 3; alternative to torch_backend (`trainer.backend=deepspeed`).

accelerate's DeepSpeedPlugin makes the engine. DeepSpeed averages gradients, but our losses are parts of a sum, so the loss is multiplied by
the number of processes. The state goes in and out one parameter at a time, by DeepSpeed's public accessors, in the layout of any other
trainer state: any backend on any number of processes continues from it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import Settings
from fsbarrier.training import policy, trainer_state
from fsbarrier.training.optimizer import make_optimizer, set_learning_rate
from fsbarrier.training.policy_model import PolicyModel
from fsbarrier.training.processes import Processes
from fsbarrier.training.safetensors_file import StoredTensors
from fsbarrier.training.sharding import Layout
from fsbarrier.training.slices import Partitioned, distinct
from fsbarrier.training.trainer_state import WEIGHT, StateLayout, TrainerState

MOMENTS = ("exp_avg", "exp_avg_sq")


def configuration(settings: Settings, processes: Processes) -> dict[str, Any]:
    """The configuration for DeepSpeed; settings that it omits have DeepSpeed's defaults."""
    trainer = settings.trainer

    def device(*offloads: str) -> dict[str, str]:
        return {"device": "cpu" if trainer.offload in offloads else "none"}

    config: dict[str, Any] = {
        # The number of micro-batches changes from step to step, so `backward` tells DeepSpeed which one is a step's last.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Use PyTorch's optimizer, because DeepSpeed compiles its own ones when they are first used.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": trainer.zero_stage,
            "offload_optimizer": device("optimizer", "all"),
            "offload_param": device("all"),
        },
        "gradient_clipping": settings.optimizer.grad_clip,
    }
    if processes.dtype == torch.bfloat16:
        # Accumulate gradients in float32, as the torch backend does.
        config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def layout_of(settings: Settings, processes: Processes) -> Layout:
    """Every ZeRO stage shards the optimizer state over all processes."""
    return Layout(processes.world, settings.trainer.offload, settings.trainer.zero_stage)


def partitioned_model(
    folder: Path, settings: Settings, config: dict[str, Any], processes: Processes
) -> PreTrainedModel:
    """Load the policy in `folder` for ZeRO-3. Each module's parameters are split over the processes as soon as the module is made, so only
    the first process, which reads the folder, ever holds all weights. Raises UsageError."""
    deepspeed = _deepspeed()
    # The weights come from the folder, and parameters that are already split cannot be initialised.
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=config):
        model = policy.from_config(folder, settings.trainer)
    model.tie_weights()
    _make_buffers(model, policy.without_weights(folder, settings.trainer))
    whole = policy.stored_weights(folder, settings.trainer) if processes.is_main else {}
    for name, parameter in distinct(model.state_dict(keep_vars=True)).items():
        with _entire(parameter), torch.no_grad():
            if processes.is_main:
                parameter.copy_(whole[name])
            if not hasattr(parameter, "ds_shape"):
                processes.from_main(parameter)
    return model


def _make_buffers(model: PreTrainedModel, like: PreTrainedModel) -> None:
    """Give a model the buffers of another one, because ZeRO-3 has computed its own in the precision of the parameters: rotary positions
    in bfloat16, for example."""
    for name, made in like.named_buffers():
        module, _, leaf = name.rpartition(".")
        held = model.get_submodule(module)._buffers
        was = held[leaf]
        held[leaf] = made.to(made.device if was is None else was.device)


def _entire(tensor: Tensor) -> AbstractContextManager[None]:
    """While this lasts, each process holds the whole of a parameter that ZeRO-3 has split, and the first may change it."""
    gathered: AbstractContextManager[None] = (
        _deepspeed().zero.GatheredParameters([tensor], modifier_rank=0)
        if hasattr(tensor, "ds_shape")
        else nullcontext()
    )
    return gathered


class DeepSpeedBackend:
    """See TorchBackend. `model`: DeepSpeed's engine around the policy, whose float32 weights start equal to its compute weights."""

    def __init__(
        self, model: PolicyModel, settings: Settings, config: dict[str, Any], processes: Processes
    ) -> None:
        _deepspeed()
        self._policy, self._processes = model, processes
        self._stage = settings.trainer.zero_stage
        self._adamw = make_optimizer(model.parameters(), settings.optimizer)
        # DeepSpeed replaces the parameters of each group by a flat partition.
        self._groups = [list(group["params"]) for group in self._adamw.param_groups]
        self.trained = {
            name: parameter for name, parameter in model.causal.named_parameters() if parameter.requires_grad
        }
        accelerator = _accelerator()
        # A kept process may load another policy, so the previous engine is freed.
        accelerator.free_memory()
        accelerator.deepspeed_plugin.deepspeed_config.clear()
        accelerator.deepspeed_plugin.deepspeed_config.update(config)
        try:
            self.model, _ = accelerator.prepare(model, self._adamw)
        except (ValueError, AssertionError) as error:
            # DeepSpeed's validation errors may have several lines.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise UsageError(f"trainer.backend=deepspeed: {' '.join(lines[:3])}") from None

    def weights(self) -> dict[str, Any]:
        """All weights of the model, under transformers' names."""
        held = distinct(self._policy.causal.state_dict(keep_vars=True))
        if self._stage < 3:
            return held
        return {
            name: Partitioned(_shape(parameter), parameter.dtype, partial(_gathered, parameter))
            if hasattr(parameter, "ds_shape")
            else parameter
            for name, parameter in held.items()
        }

    def state(self, optimizer_steps: int, *, without_weights: bool) -> TrainerState:
        """See TrainerState. Each tensor is gathered when it is written."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        steps = {float(state["step"]) for state in self._adamw.state.values()}
        self._link_moments()
        tensors, scalars = {}, {}
        for name, parameter in self.trained.items():

            def of(get: Any, parameter: Parameter = parameter) -> Any:
                return Partitioned(_shape(parameter), torch.float32, get)

            if not without_weights:
                tensors[f"{WEIGHT}/{name}"] = of(partial(safe_get_full_fp32_param, parameter))
            for step in steps:
                scalars[f"step/{name}"] = step
            for key in MOMENTS if steps else ():
                tensors[f"{key}/{name}"] = of(partial(safe_get_full_optimizer_state, parameter, key))
        return TrainerState(optimizer_steps, tensors, scalars)

    def restore(self, folder: Path, policy_version: int) -> StateLayout:
        """See trainer_state.restore."""
        layout = trainer_state.read_checked(folder, self.trained.keys(), policy_version)
        if layout.scalars:
            self._make_moments()
            self._link_moments()
        with StoredTensors(folder, layout.tensors) as stored:
            for full in layout.tensors:
                key, _, name = full.partition("/")
                value = torch.empty(_shape(self.trained[name]))
                stored.fill(full, value)
                self._set(self.trained[name], value.to(self._processes.device), "" if key == WEIGHT else key)
        for state in self._adamw.state.values():
            state["step"].fill_(max(layout.scalars.values()))
        return layout

    def _make_moments(self) -> None:
        """DeepSpeed has no moments before its first step. A step with zero gradients and a learning rate of 0 makes them and leaves
        the weights as they are."""
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self._processes.device)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        log_probs, *_ = self.model(inputs, torch.tensor([[False, True]], device=tokens.device), 1.0)
        self.backward(log_probs.sum() * 0.0, last=True)
        self.step(0.0, 1.0)

    def _link_moments(self) -> None:
        """Link all parameters to their moments: ZeRO-1 and 2 do it after the first group's first step, when other groups have none yet."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        if self._stage < 3 and self._adamw.state:
            for parameters, group in zip(self._groups, self._adamw.param_groups, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, group["params"][0], self._adamw.state)

    def _set(self, parameter: Parameter, value: Tensor, key: str = "") -> None:
        """Set a parameter's float32 weight, or the moment `key` of it."""
        from deepspeed import utils

        with torch.no_grad():
            if self._stage < 3 and key:
                utils.safe_set_full_optimizer_state(parameter, value, key)
            elif self._stage < 3:
                utils.safe_set_full_fp32_param(parameter, value)
            else:
                # The accessors of whole tensors need sizes that are multiples of the number of processes.
                size = utils.safe_get_local_fp32_param(parameter).numel()
                padded = value.new_zeros(size * self._processes.world)
                padded[: value.numel()] = value.flatten()
                mine = padded[size * self._processes.rank :][:size]
                if key:
                    utils.safe_set_local_optimizer_state(parameter, mine, key)
                else:
                    utils.safe_set_local_fp32_param(parameter, mine)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate a micro-batch's gradients."""
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self._processes.world)

    def step(self, lr: float, largest_norm: float) -> float:
        """Apply and reset the gradients, clipped according to the configuration; returns their norm before clipping.

        A non-finite norm changes nothing.
        """
        set_learning_rate(self._adamw, lr)
        self.model.step()
        return float(self.model.get_global_grad_norm()) if self.model.was_step_applied() else math.nan


def _shape(parameter: Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _gathered(parameter: Parameter) -> Tensor:
    """Gather the whole of a parameter that ZeRO-3 computes with. Every process must call this."""
    with _deepspeed().zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


@functools.cache
def _accelerator() -> Any:
    """accelerate's only Accelerator of this process; each policy brings its own configuration."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    # accelerate reads torchrun's environment variables, which a single process does not have.
    for name in ("LOCAL_RANK", "RANK"):
        os.environ.setdefault(name, "0")
    # Without this, accelerate would silently not use DeepSpeed on a CPU.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    # Stage 3 here would make transformers split every model that it loads, the reference policy too.
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}, zero3_init_flag=False)
    return Accelerator(deepspeed_plugin=plugin)


def _deepspeed() -> Any:
    """Import DeepSpeed and silence its messages, except warnings and errors."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # DeepSpeed calls functions for which torch has newer names, and torch would warn at each step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # On CPUs DeepSpeed would compile its shared-memory communication at its first use, which takes minutes and a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
