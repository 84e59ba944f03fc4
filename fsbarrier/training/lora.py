"""Low-rank adapters (LoRA, Hu et al. 2021), added to the policy by peft and trained instead of it.

A version consists of the adapters alone, where every node can merge them itself (merge_adapters.py). The frozen policy stays in its compute
precision; the adapters are in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import LoraSettings
from fsbarrier.training.merge_adapters import PREFIX
from fsbarrier.training.policy import decoder_of
from fsbarrier.training.slices import distinct, whole_tensor

# peft's name of the only adapter. Names of parameters contain it in the model, but not in files.
ADAPTER = "default"
NAMEABLE = "name linear layers in lora.targets, such as q_proj,k_proj,v_proj,o_proj"


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters in a model. `layers`: peft's layers by the weight that each adds to, under the weight's name without adapters."""

    config: Any
    layers: Mapping[str, Any]

    @classmethod
    def put_into(cls, causal: PreTrainedModel, settings: LoraSettings, folder: Path) -> Self:
        """Add freshly initialised adapters to the model of `folder`, and freeze the rest. Raises UsageError."""
        import peft

        config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=list(settings.targets) or "all-linear",
            exclude_modules=_beside_the_decoder(causal) or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(folder),
            inference_mode=False,
        )
        _refuse_tied_head(causal, settings)
        try:
            peft.inject_adapter_in_model(config, causal, ADAPTER)
        except ValueError as error:
            problem = shorten(str(error), 160, placeholder=" ...")
            raise UsageError(f"lora.targets: {problem}; {NAMEABLE}") from None
        chosen = {
            name: module
            for name, module in causal.named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        }
        _refuse_other_layers(chosen, settings)
        layers = {}
        for name, module in chosen.items():
            module.lora_A.float(), module.lora_B.float()
            layers[f"{name}.weight"] = module
        # peft only requires that one of the targets exists.
        for target in settings.targets:
            if not any(name.endswith(f"{target}.weight") for name in layers):
                raise UsageError(f"lora.targets: the model has no layer {target}; {NAMEABLE}")
        return cls(config, layers)

    def weights(self, causal: PreTrainedModel) -> dict[str, Tensor]:
        """The model's weights under their names without adapters."""
        return {
            name.replace(".base_layer.", "."): value
            for name, value in distinct(causal.state_dict(keep_vars=True)).items()
            if ".lora_" not in name
        }

    def renamed(self, causal: PreTrainedModel) -> dict[str, str] | None:
        """The names of the adapted weights in the model's files, where they differ from the model's own. None: the files have an adapted
        weight in another form, for example as a part of another one, so that nobody but the trainer can merge the adapters."""
        names = {}
        for name in self.layers:
            weight = torch.empty(1, device="meta")
            try:
                stored = revert_weight_conversion(causal, {name: weight})
            except Exception:
                # The conversion needs several weights, or their shape.
                return None
            if len(stored) != 1 or next(iter(stored.values())).shape != weight.shape:
                return None
            names[name] = next(iter(stored))
        return {name: other for name, other in names.items() if name != other}

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """One of the `weights` with its adapter merged. Every process must call this in the same order."""
        layer = self.layers.get(name)
        if layer is None:
            return weight
        down, up = (
            whole_tensor(part[ADAPTER].weight, torch.float32) for part in (layer.lora_A, layer.lora_B)
        )
        scaling: float = layer.scaling[ADAPTER]
        return whole_tensor(weight, torch.float32) + scaling * (up @ down)

    def stored(self, causal: PreTrainedModel) -> dict[str, Tensor]:
        """The adapters under their names in peft's files."""
        return {
            PREFIX + name.replace(f".{ADAPTER}.", "."): value
            for name, value in causal.state_dict().items()
            if ".lora_" in name
        }


def _beside_the_decoder(causal: PreTrainedModel) -> list[str]:
    """The linear layers of a model's vision encoder, which get no adapters."""
    inside = {*decoder_of(causal).modules(), causal.get_output_embeddings()}
    linear = ((name, layer) for name, layer in causal.named_modules() if isinstance(layer, torch.nn.Linear))
    return [name for name, layer in linear if layer not in inside]


def _refuse_tied_head(causal: PreTrainedModel, settings: LoraSettings) -> None:
    """Refuse adapters in a tied head: head and embedding are served as one weight, so the head alone cannot change. Raises UsageError."""
    head = causal.get_output_embeddings()
    if head is None or head.weight is not causal.get_input_embeddings().weight:
        return
    names = [f".{name}" for name, module in causal.named_modules() if module is head]
    if any(name.endswith(f".{target}") for name in names for target in settings.targets):
        raise UsageError(
            f"lora.targets={','.join(settings.targets)}: this model's output head is tied to its embedding (tie_word_embeddings), so "
            "adapters in the head would be trained but not served; drop the head from the list"
        )


def _refuse_other_layers(chosen: Mapping[str, Any], settings: LoraSettings) -> None:
    """Refuse adapters in other than linear layers: peft allows them, but `merged` cannot merge them. Raises UsageError."""
    for name, layer in chosen.items():
        if not isinstance(layer.get_base_layer(), torch.nn.Linear):
            subject = (
                f"lora.targets: {name} is" if settings.targets else f"lora.rank={settings.rank}: {name} is"
            )
            raise UsageError(f"{subject} no linear layer (a mixture of experts has such); {NAMEABLE}")
