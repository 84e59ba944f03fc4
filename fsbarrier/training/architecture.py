"""Measures the dimensions of the model that transformers builds from a configuration, without memory for weights.

`python -m fsbarrier.training.architecture FOLDER [RANK [TARGET]...]`
Prints a ModelShape as JSON; with RANK, that of the model with adapters of this rank on the targets. Exit code 2 and one line on stderr
if the model cannot be made, or cannot have these adapters; libraries may print something before that line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from fsbarrier.errors import UsageError
from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings.sections import LoraSettings
from fsbarrier.training.lora import Adapters
from fsbarrier.training.policy import architecture, decoder_of, vision_parameters
from fsbarrier.training.vision_inputs import blindness


def measure(model: PreTrainedModel) -> ModelShape:
    """The shape of a model; its weights may be on the device "meta"."""
    config = model.config.get_text_config()
    layers = _layers(decoder_of(model), config.num_hidden_layers)
    heads, hidden = config.num_attention_heads, config.hidden_size
    key_value_heads = _number(config, "num_key_value_heads") or heads
    if latent := _number(config, "kv_lora_rank"):
        # DeepSeek computes keys and values from one latent vector, the same for all heads, and an engine caches only that.
        query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        value = heads * config.v_head_dim
        width, key_value = max(query, value), (query + value) // 2
        cached, key_value_heads = latent + config.qk_rope_head_dim, 1
    else:
        head_size = _number(config, "head_dim") or hidden // heads
        width, key_value = heads * head_size, key_value_heads * head_size
        cached = 2 * key_value
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return ModelShape(
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        key_value_heads=key_value_heads,
        attention=width,
        width=8 * hidden + 3 * width + 4 * key_value + 4 * _feed_forward(config),
        cached=cached,
        vocabulary=config.vocab_size,
        block=max(_parameters(layer) for layer in layers),
        parameters=_parameters(model),
        trained=_parameters(model),
        vision=sum(parameter.numel() for parameter in vision_parameters(model)),
        head=_parameters(head) if head is not None and head.weight is not embedding.weight else 0,
    )


def shape_of(folder: Path, lora: LoraSettings) -> ModelShape:
    """The shape of the model in a folder, trained with these adapters. Raises UsageError."""
    model = architecture(folder)
    shape = replace(measure(model), blind=blindness(folder, model.config.to_dict()))
    if not lora.rank:
        return shape
    Adapters.put_into(model, lora, folder)
    return replace(
        shape, trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    )


def _number(config: Any, name: str) -> int:
    """A number of a configuration, or 0 if it is missing: families name and omit different ones."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _feed_forward(config: Any) -> int:
    """The feed-forward width for one token: all its experts together, or a layer without experts if that is wider."""
    dense = _number(config, "intermediate_size")
    each = _number(config, "moe_intermediate_size") or dense
    chosen = _number(config, "num_experts_per_tok") if _experts(config) else 0
    shared = _number(config, "shared_expert_intermediate_size") or _number(config, "n_shared_experts") * each
    return max(dense, chosen * each + shared)


def _experts(config: Any) -> int:
    """How many experts a layer chooses from; families have three names for it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(_number(config, name) for name in names)


def _layers(model: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    """The decoder's blocks. Raises UsageError for a model that has none."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise UsageError(f"{type(model).__name__} has no list of {count} decoder layers")


def _parameters(module: torch.nn.Module) -> int:
    """The number of parameters; a tied head counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def main(arguments: Sequence[str]) -> int:
    folder, rank, *targets = (*arguments, "0") if len(arguments) == 1 else arguments
    try:
        shape = shape_of(Path(folder), LoraSettings(rank=int(rank), targets=tuple(targets)))
    except UsageError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(shape).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
