"""The user's DeepSpeed configuration beside the run's settings: what a setting decides is filled in, and everything else is either passed
on or refused.

Imports neither DeepSpeed nor torch, so that node 0 can check the file before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import Settings
from fsbarrier.store import reading

AUTO = "auto"
ZERO = "zero_optimization"
# Entries that settings decide, by their beginnings. A file leaves them out, or says "auto", or that they are off.
DECIDED = {
    "train_batch_size": "trainer.minibatch",
    "train_micro_batch_size_per_gpu": "trainer.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "trainer.max_tokens_per_micro_batch",
    "gradient_clipping": "optimizer.grad_clip",
    "optimizer": "optimizer.*",
    "scheduler": "optimizer.schedule",
    "bf16": "trainer.dtype",
    "fp16": "trainer.dtype",
    "communication_data_type": "trainer.dtype",
    "data_types": "trainer.dtype",
    "zero_force_ds_cpu_optimizer": "trainer.offload",
    f"{ZERO}.offload_optimizer.device": "trainer.offload",
    f"{ZERO}.offload_param.device": "trainer.offload",
}
# "auto" here is filled in by accelerate from the model's width; elsewhere DeepSpeed's default counts.
BY_WIDTH = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
# What is passed on: it changes how fast DeepSpeed is and what it prints, not what it computes or which process holds what.
PASSED = (
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "flops_profiler"),
    *("prescale_gradients", "gradient_predivide_factor", "disable_allgather", "tensorboard", "csv_monitor"),
    *(
        f"{ZERO}.{name}"
        for name in (
            *("stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "round_robin_gradients"),
            *("allgather_partitions", "allgather_bucket_size", "sub_group_size", "stage3_", "offload_optimizer.pin_memory"),
            *("offload_param.pin_memory", "ignore_unused_parameters", "memory_efficient_linear"),
        )
    ),
)  # fmt: skip


# What is done in any case.
SAME = (("optimizer.type", "AdamW"), ("zero_allow_untested_optimizer", True))


def read(path: str | None) -> dict[str, Any]:
    """Reads the file named by `trainer.deepspeed`; {} without one. Raises UsageError."""
    return reading.json_object(Path(path), UsageError, called=f"trainer.deepspeed={path}") if path else {}


def filled(given: Mapping[str, Any], settings: Settings, dtype: str) -> dict[str, Any]:
    """The configuration for DeepSpeed, for a run that computes in `dtype`. Raises UsageError that names everything it cannot do."""
    trainer = settings.trainer
    if problems := list(_problems(given, settings)):
        raise UsageError(f"trainer.deepspeed={trainer.deepspeed}: {'; '.join(problems)}")
    zero = {**_without_auto(given.get(ZERO) or {}), "stage": stage_of(given)}
    for name, offloads in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
        device = "cpu" if trainer.offload in offloads else "none"
        zero[name] = {**(zero.get(name) or {}), "device": device}
    config = {name: value for name, value in _without_auto(given).items() if name not in DECIDED}
    # DeepSpeed is told which micro-batch of a step is the last; their number changes from step to step.
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    # PyTorch's optimizer: DeepSpeed's own are compiled when they are first used.
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config |= {ZERO: zero, "gradient_clipping": settings.optimizer.grad_clip}
    if dtype == "bfloat16":
        # Accumulate gradients in float32, as the torch backend does.
        config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def stage_of(given: Mapping[str, Any]) -> Any:
    """The ZeRO stage in the file; 3 by default, because only stage 3 shards the policy too."""
    zero = given.get(ZERO)
    found = zero.get("stage") if isinstance(zero, Mapping) else None
    return 3 if found in (None, AUTO) else found


def _problems(given: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    stage = stage_of(given)
    if stage not in (1, 2, 3):
        yield f"{ZERO}.stage={stage}: must be 1, 2 or 3 (to train without ZeRO, use trainer.backend=torch)"
    elif stage != 3 and (settings.trainer.shard == "all" or settings.trainer.offload == "all"):
        named = "shard" if settings.trainer.shard == "all" else "offload"
        yield f"{ZERO}.stage={stage}, but trainer.{named}=all requires stage 3"
    for path, value in _leaves(given):
        off = value is None or value is False or value in (AUTO, "none")
        if off or path.startswith(PASSED) or (path, value) in SAME:
            continue
        if path.startswith("fp16.") and path != "fp16.enabled":
            # It says how float16 is computed, which is off.
            continue
        decided_by = next((name for key, name in DECIDED.items() if f"{path}.".startswith(f"{key}.")), None)
        if decided_by is not None:
            yield f'{path}={value}: the setting {decided_by} decides this; write "auto" or leave it out'
        else:
            yield f"{path}={value}: not supported; leave it out"


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else deepcopy(value)
        for name, value in config.items()
        if value != AUTO or name in BY_WIDTH
    }


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each entry that is no table, by its whole name."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
