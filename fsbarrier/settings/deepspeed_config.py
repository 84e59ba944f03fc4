"""Merges the user's DeepSpeed configuration with the run's settings: fills in "auto" and rejects contradictions.

Imports neither DeepSpeed nor torch, so that node 0 can check the file before anything starts. Entries that no setting concerns are passed
on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from fsbarrier import reading
from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import Settings

AUTO = "auto"
ZERO = "zero_optimization"
# The tables of the configuration that are checked entry by entry.
SECTIONS = (ZERO, f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", "optimizer", "bf16", "data_types")
# The number of micro-batches changes from step to step; fsbarrier tells DeepSpeed which one is the last.
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Features that change the arithmetic, the sharding or the optimizer step and that fsbarrier does not support, with the only value allowed.
WITHOUT: Mapping[str, object] = {
    "fp16.enabled": False,
    "amp.enabled": False,
    "torch_autocast.enabled": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": 0,
    "elasticity.enabled": False,
    "curriculum_learning.enabled": False,
    "data_efficiency.enabled": False,
    "progressive_layer_drop.enabled": False,
    "compile.deepcompile": False,
    "compression_training": {},
    "sparse_attention": {},
    "pipeline": {},
    "expert_parallel": {},
    # fsbarrier sets the learning rate before each step.
    "scheduler": {},
    # Both backends use PyTorch's optimizer.
    "optimizer.type": "AdamW",
    "optimizer.params.adam_w_mode": True,
    "zero_force_ds_cpu_optimizer": False,
    f"{ZERO}.zenflow": {},
    f"{ZERO}.zero_hpz_partition_size": 1,
    f"{ZERO}.mics_shard_size": -1,
    f"{ZERO}.zero_quantized_weights": False,
    f"{ZERO}.zero_quantized_nontrainable_weights": False,
    f"{ZERO}.zero_quantized_gradients": False,
    f"{ZERO}.compute_grad_norm": True,
    f"{ZERO}.offload_optimizer.ratio": 1.0,
    f"{ZERO}.offload_optimizer.super_offload": False,
    f"{ZERO}.cpu_offload": False,
    f"{ZERO}.cpu_offload_params": False,
}


def read(path: str | None) -> dict[str, Any]:
    """Reads the file named by `trainer.deepspeed`; {} without one. Raises UsageError."""
    return reading.json_object(Path(path), UsageError, called=f"trainer.deepspeed={path}") if path else {}


def filled(given: Mapping[str, Any], settings: Settings, dtype: str) -> dict[str, Any]:
    """The configuration for DeepSpeed, for a run that computes in `dtype`. Raises UsageError that lists all contradictions."""
    conflicts = list(_conflicts(given, settings, dtype))
    if conflicts:
        raise UsageError(
            f"trainer.deepspeed={settings.trainer.deepspeed}: {'; '.join(conflicts)}. Change the file or the setting, or write "
            '"auto" in the file'
        )
    offload, config = settings.trainer.offload, deepcopy(dict(given))
    # Drop an "auto" that no setting concerns, so that DeepSpeed uses its default.
    _drop_auto(config)
    for section in ("optimizer", *BATCH_SIZES):
        config.pop(section, None)
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config["gradient_clipping"] = settings.optimizer.grad_clip
    zero = config.setdefault(ZERO, {})
    zero["stage"] = stage_of(given)
    for name, wanted in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
        if offload in wanted:
            zero[name] = {**(zero.get(name) or {}), "device": "cpu"}
    if dtype == "bfloat16":
        config.setdefault("bf16", {})["enabled"] = True
        # Accumulate gradients in float32, as the torch backend does.
        config["communication_data_type"] = "fp32"
        config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
    return config


def stage_of(given: Mapping[str, Any]) -> Any:
    """The ZeRO stage in the file; 3 by default, because only stage 3 shards the policy too."""
    found = _at(given, f"{ZERO}.stage")
    return 3 if found in (None, AUTO) else found


def _conflicts(given: Mapping[str, Any], settings: Settings, dtype: str) -> Iterator[str]:
    """Yields one message per contradiction, with the value in the file and the one in the settings."""
    trainer, optimizer, stage = settings.trainer, settings.optimizer, stage_of(given)
    for path in SECTIONS:
        found = _at(given, path)
        if found not in (None, AUTO) and not isinstance(found, Mapping):
            yield f"{path}={_shown(found)}: must be an object"
    if stage not in (1, 2, 3):
        yield f"{ZERO}.stage={_shown(stage)}: must be 1, 2 or 3 (to train without ZeRO, use trainer.backend=torch)"
    elif stage != 3 and trainer.shard == "all":
        yield f"{ZERO}.stage={stage}, but trainer.shard=all requires stage 3"
    elif stage != 3 and trainer.offload == "all":
        yield f"{ZERO}.stage={stage}, but trainer.offload=all requires stage 3"
    offloaded = "none" if trainer.offload == "none" else "cpu"
    parameters = "cpu" if trainer.offload == "all" else "none"
    here = "" if trainer.dtype == dtype else f", which is {dtype} here"
    reduced = "fp32" if dtype == "bfloat16" else None
    for path, wanted, setting in (
        (f"{ZERO}.offload_optimizer.device", offloaded, f"trainer.offload={trainer.offload}"),
        (f"{ZERO}.offload_param.device", parameters, f"trainer.offload={trainer.offload}"),
        ("train_batch_size", trainer.minibatch, f"trainer.minibatch={trainer.minibatch}"),
        (
            "train_micro_batch_size_per_gpu",
            trainer.micro_batch,
            f"trainer.micro_batch={_shown(trainer.micro_batch)}",
        ),
        ("gradient_accumulation_steps", None, "fsbarrier derives it from the micro-batch settings"),
        ("gradient_clipping", optimizer.grad_clip, f"optimizer.grad_clip={optimizer.grad_clip:g}"),
        ("optimizer.params.lr", optimizer.lr, f"optimizer.lr={optimizer.lr:g}"),
        ("optimizer.params.betas", list(optimizer.betas), f"optimizer.betas={_shown(optimizer.betas)}"),
        (
            "optimizer.params.weight_decay",
            optimizer.weight_decay,
            f"optimizer.weight_decay={optimizer.weight_decay:g}",
        ),
        ("optimizer.params.eps", optimizer.eps, f"optimizer.eps={optimizer.eps:g}"),
        ("bf16.enabled", dtype == "bfloat16", f"trainer.dtype={trainer.dtype}{here}"),
        ("communication_data_type", reduced or "fp32", "fsbarrier accumulates gradients in float32"),
        ("data_types.grad_accum_dtype", reduced or "fp32", "fsbarrier accumulates gradients in float32"),
    ):
        found = _at(given, path)
        if found not in (None, AUTO) and not _same(found, wanted):
            yield f"{path}={_shown(found)}, but {setting}"
    for path, neutral in WITHOUT.items():
        found = _at(given, path)
        if found not in (None, AUTO) and not _same(found, neutral):
            yield f"{path}={_shown(found)}, but fsbarrier supports only {_shown(neutral)}"


def _same(found: object, wanted: object) -> bool:
    # In Python True == 1.
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _at(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _drop_auto(config: dict[str, Any]) -> None:
    for name, value in list(config.items()):
        if value == AUTO:
            del config[name]
        elif isinstance(value, dict):
            _drop_auto(value)
