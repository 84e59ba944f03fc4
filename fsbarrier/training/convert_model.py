"""A policy version's model folder in another precision: fp32 from the trainer's own weights, bf16 from what is served."""

from __future__ import annotations

import json
from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsbarrier import files
from fsbarrier.errors import UsageError
from fsbarrier.reading import JSON_BYTES, read_bytes
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.hashed_file import copy_hashed
from fsbarrier.training import checkpoint_write, safetensors_file
from fsbarrier.training.checkpoint_write import ADAPTER
from fsbarrier.training.stored_tensors import StoredTensors
from fsbarrier.training.trainer_state import WEIGHT, Layout

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def convert(
    model: Path,
    trainer: Path | None,
    out: Path,
    dtype: torch.dtype,
    *,
    root: Path | None = None,
    trained: bool = True,
) -> None:
    """Write the folder `model` anew with its weights in `dtype`. `trainer`: the state that belongs to it; None: there is none.
    `root`: of the run in which it lies, where no link is followed. `trained`: whether its trainer had more exact weights than it serves.

    Raises OSError, ProgramFailed (a damaged file), UsageError (no exact weights of the whole model are there).
    """
    files.make_dirs(out)
    with ExitStack() as stack:
        source = stack.enter_context(StoredTensors.of_model(model))
        names = {name: name for name in source.parts}
        architecture = None
        if dtype is torch.float32 and trained and torch.bfloat16 in map(source.dtype, names):
            if trainer is None:
                raise UsageError(
                    f"--dtype fp32: {model} is served in bf16, and no trainer state in the run directory has its exact weights "
                    "(checkpoint.trainer_every says how often there is one); export another version, or in bf16"
                )
            layout = Layout.read(trainer)
            source = stack.enter_context(StoredTensors(trainer, layout.shapes, layout.parts))
            names = {key.partition("/")[2]: key for key in layout.parts if key.startswith(f"{WEIGHT}/")}
            architecture = _architecture(model)
            # A tied weight has the name under which it comes first.
            if lacking := {name for name, _ in architecture.named_parameters()} - set(names):
                raise UsageError(
                    f"{trainer}: not all weights are there in fp32 (none of {min(lacking)}); export bf16"
                )
        sizes = {name: prod(source.shapes[key]) * dtype.itemsize for name, key in names.items()}
        weights: dict[str, str] = {}
        # One file after the other, so that no more than one is in memory.
        for _, file, chosen in checkpoint_write.plan_files(sizes, world=1):
            tensors = {name: source.read(names[name], dtype) for name in chosen}
            if architecture is not None:
                tensors = revert_weight_conversion(architecture, tensors)
            safetensors_file.write(out / file, tensors)
            weights |= dict.fromkeys(tensors, file)
    checkpoint_write.write_index(out, weights, sum(sizes.values()))
    config = json.loads(read_bytes(model / "config.json", JSON_BYTES, links=root is None))
    for key in {"dtype", "torch_dtype"} & set(config):
        config[key] = str(dtype).removeprefix("torch.")
    files.write_atomic(out / "config.json", json.dumps(config, indent=2).encode(), durable=True)
    checkpoint_write.copy_beside(model, out, root)
    if (adapter := model / ADAPTER).is_dir():
        # It is exact already.
        files.make_dirs(out / ADAPTER)
        listed = None
        if root is not None and (model.parent / checkpoints.MANIFEST).exists():
            listed = checkpoints.read_manifest(model.parent).files
        for path in sorted(adapter.iterdir()):
            if path.is_file() and (listed is None or f"{model.name}/{ADAPTER}/{path.name}" in listed):
                copy_hashed(path, out / ADAPTER / path.name, root)
    if (model / "generation_config.json").exists():
        copy_hashed(model / "generation_config.json", out / "generation_config.json", root)


def _architecture(model: Path) -> PreTrainedModel:
    """The model without any weights, which knows what transformers calls them and what they are called in folders."""
    with torch.device("meta"):
        found: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return found
