"""Converts a policy version to another precision: fp32 from the trainer state, bf16 from the served weights."""

from __future__ import annotations

import json
from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch
from transformers.core_model_loading import revert_weight_conversion

from fsbarrier.errors import UsageError
from fsbarrier.rundir.hashed_file import copy_hashed
from fsbarrier.store import files, reading
from fsbarrier.training import checkpoint_write, policy, safetensors_file
from fsbarrier.training.checkpoint_write import ADAPTER
from fsbarrier.training.stored_tensors import StoredTensors
from fsbarrier.training.trainer_state import WEIGHT, StateLayout

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def convert(
    model: Path,
    trainer: Path | None,
    out: Path,
    dtype: torch.dtype,
    *,
    trained: bool = True,
    root: Path | None = None,
) -> None:
    """Write a copy of the folder `model` with its weights in `dtype`. `trainer`: its trainer state; None: there is none.
    `trained`: whether a trainer had more precise weights than the served ones. `root`: no link is followed below it.

    Raises OSError, ProgramFailed (damaged file), UsageError (fp32 weights not available).
    """
    files.make_dirs(out)
    with ExitStack() as stack:
        source = stack.enter_context(StoredTensors.of_model(model))
        names = {name: name for name in source.parts}
        architecture = None
        if dtype is torch.float32 and trained and torch.bfloat16 in map(source.dtype, names):
            if trainer is None:
                raise UsageError(
                    "--dtype fp32: this policy is served in bf16, and the run directory contains no trainer state with its fp32 weights "
                    "(see checkpoint.trainer_every); export another version, or use --dtype bf16"
                )
            layout = StateLayout.read(trainer)
            source = stack.enter_context(StoredTensors(trainer, layout.shapes, layout.parts))
            names = {key.partition("/")[2]: key for key in layout.parts if key.startswith(f"{WEIGHT}/")}
            architecture = policy.architecture(model)
            # A tied weight is stored under the first of its names.
            if lacking := {name for name, _ in architecture.named_parameters()} - set(names):
                raise UsageError(
                    f"--dtype fp32: its trainer state does not contain all weights in fp32 ({min(lacking)} is missing); use --dtype bf16"
                )
        sizes = {name: prod(source.shapes[key]) * dtype.itemsize for name, key in names.items()}
        weights: dict[str, str] = {}
        # Write one file at a time, to keep only one in memory.
        for _, file, chosen in checkpoint_write.plan_files(sizes, world=1):
            tensors = {name: source.read(names[name], dtype) for name in chosen}
            if architecture is not None:
                tensors = revert_weight_conversion(architecture, tensors)
            safetensors_file.write(out / file, tensors)
            weights |= dict.fromkeys(tensors, file)
    checkpoint_write.write_index(out, weights, sum(sizes.values()))
    config = json.loads(reading.read_bytes(model / "config.json", reading.JSON_BYTES, links=root is None))
    for key in {"dtype", "torch_dtype"} & set(config):
        config[key] = str(dtype).removeprefix("torch.")
    files.write_atomic(out / "config.json", json.dumps(config, indent=2).encode(), durable=True)
    checkpoint_write.copy_beside(model, out, root)
    if (adapter := model / ADAPTER).is_dir():
        # Adapters are already stored in float32.
        files.make_dirs(out / ADAPTER)
        for path in filter(Path.is_file, sorted(adapter.iterdir())):
            copy_hashed(path, out / ADAPTER / path.name, root)
    if (model / "generation_config.json").exists():
        copy_hashed(model / "generation_config.json", out / "generation_config.json", root)
