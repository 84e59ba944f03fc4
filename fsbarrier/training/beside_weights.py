"""Writes the files beside the weights in a model folder: configuration, tokenizer, templates. A new version gets those of the previous one.

transformers could write them anew, but it would use its own names, drop fields that it does not know, and refuse to save some values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.checkpoints import ADAPTER
from fsbarrier.rundir.hashed_file import FileDigest, copy_hashed, digest_of, write_hashed
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files, reading

# Files not copied from the previous model folder: weights in any format, because they are not the new version's.
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".index.json",
    ".onnx",
    ".onnx_data",
    ".h5",
    ".msgpack",
)
CONFIG = "config.json"
# The names of the weights' precision in a configuration; the second is the older name.
PRECISION = ("dtype", "torch_dtype")


def write_beside(
    out: Path, beside: Path | None, configuration: PreTrainedConfig, dtype: torch.dtype
) -> dict[str, FileDigest]:
    """Give the new version `out` the files beside the weights of the previous policy's model folder `beside` (None: there was none).

    Everything is copied byte for byte, except that the configuration names the new weights' precision `dtype`. Returns the written files by
    their path in `out/model`. Raises OSError, ProgramFailed.
    """
    model, written = out / "model", dict[str, FileDigest]()
    if beside is not None:
        root = _made_below(beside, out)
        written |= copy_beside(beside, model, root)
        if (beside / CONFIG).is_file():
            return written | {CONFIG: _copy_config(beside / CONFIG, model / CONFIG, dtype, root)}
    configuration = deepcopy(configuration)
    configuration.dtype = dtype
    configuration.save_pretrained(model)
    return written | {CONFIG: digest_of(model / CONFIG)}


def _copy_config(source: Path, target: Path, dtype: torch.dtype, root: Path | None) -> FileDigest:
    """Copy a configuration, changing only its precision: transformers would use newer names, add all defaults and drop unknown fields."""
    held = reading.json_object(source, ProgramFailed)
    wanted = _in_precision(held, str(dtype).removeprefix("torch."))
    if not any(name in wanted for name in PRECISION):
        wanted[PRECISION[0]] = str(dtype).removeprefix("torch.")
    if wanted == held:
        return copy_hashed(source, target, root)
    return write_hashed(target, json.dumps(wanted, indent=2).encode())


def _in_precision(config: Mapping[str, object], dtype: str) -> dict[str, object]:
    """Return a configuration in which it and its parts name this precision."""
    return {
        name: dtype
        if name in PRECISION
        else _in_precision(value, dtype)
        if isinstance(value, Mapping) and name != "quantization_config"
        else value
        for name, value in config.items()
    }


def _made_below(beside: Path, out: Path) -> Path | None:
    """The run's folder that contains the model folder `beside`; None if `beside` is the user's own folder."""
    if beside.parent.parent == out.parent:
        # The checkpoints folder, which may be a symbolic link to a larger disk.
        return out.parent
    log_path = out.parent.parent
    return log_path if beside.is_relative_to(RunPaths(log_path).first_policy) else None


def copy_beside(source: Path, out: Path, root: Path | None) -> dict[str, FileDigest]:
    """Copy the files of a model folder and of the folders in it, other than weights and its configuration; returns the copied ones by
    their path in it. Hidden folders are not copied (`.git`, `.cache`).

    `root`: the folder of the run that contains `source`; for a policy version there, only files in its manifest are copied. None: a user's
    own folder, which may contain links to files, as the Hugging Face cache does. Raises OSError, ProgramFailed.
    """
    listed: Mapping[str, FileDigest] | None = None
    if root is not None and (source.parent / checkpoints.MANIFEST).exists():
        listed = checkpoints.read_manifest(source.parent).files
    copied = dict[str, FileDigest]()
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        hidden = any(folder.startswith(".") for folder in name.parts[:-1])
        if hidden or name.parts[0] == ADAPTER or str(name) == CONFIG or path.name.endswith(WEIGHTS):
            continue
        if not path.is_file() or (root is not None and path.is_symlink()):
            continue
        key = f"{source.name}/{name}"
        if listed is not None and key not in listed:
            continue
        digest = None if listed is None else listed[key]
        target = out / name
        files.make_dirs(target.parent)
        copied[str(name)] = checkpoints.copy_listed(path, target, digest, root)
    for folder in {out / above for name in copied for above in Path(name).parents}:
        files.fsync_dir(folder)
    return copied
