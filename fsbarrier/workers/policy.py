"""Loading a policy for training and writing it for serving: plain Hugging Face folders, embeddings untied.

Untied because an engine that reloads weights in place may keep the old output head of a tied model without saying so.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fsbarrier import files
from fsbarrier.errors import UsageError

#: what a model folder holds beside the weights: everything small that is not a weight file
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
WRITTEN = frozenset({"config.json"})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The causal model in `folder`, untied. Raises UsageError for a folder that transformers cannot load."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    untie(model)
    return model


def untie(model: Any) -> None:
    """Give the output head weights of its own, equal to what it shared."""
    config = model.config
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    shared = head is not None and head.weight.data_ptr() == embedding.weight.data_ptr()
    if shared:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    config.tie_word_embeddings = False
    for name in ("_tied_weights_keys", "all_tied_weights_keys"):
        if shared and getattr(model, name, None):
            setattr(model, name, type(getattr(model, name))())


def save(model: Any, source: Path, out: Path, dtype: torch.dtype) -> None:
    """Write `model` to `out` in `dtype`, with the tokenizer and everything else that `source` has beside its weights."""
    files.make_dirs(out)
    state = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    model.config.dtype = dtype
    model.save_pretrained(out, state_dict=state, safe_serialization=True)
    copy_beside(source, out)


def copy_beside(source: Path, out: Path) -> None:
    """Copy what is no weight and was not written anew."""
    for path in source.iterdir():
        there = (out / path.name).exists()
        if path.is_file() and not there and path.name not in WRITTEN and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, out / path.name)
