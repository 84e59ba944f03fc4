"""Loads a policy, or a critic, for training from a Hugging Face folder. A tied output head stays tied.

A critic (`value`) is a token classifier with one label: its output head is a new one if the folder has none with one output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from fsbarrier.engine.model import sees
from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import TrainerSettings
from fsbarrier.training.processes import Processes
from fsbarrier.training.slices import distinct, local_part

# What transformers raises where a folder is no model, or its configuration has a wrong value.
_UNLOADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)


def load(
    folder: Path,
    settings: TrainerSettings,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    *,
    value: bool = False,
) -> PreTrainedModel:
    """Load the model in `folder`, in `dtype` ("auto": its own) and without dropout. Raises UsageError if it is incomplete."""
    # Its progress bar would fill the log.
    transformers.utils.logging.disable_progress_bar()
    with _naming(folder):
        config, kind = _kind(folder, value=value)
        made = _class_of(config, kind)
        attention = attention_for(config, settings, made)
        if dtype == "auto":
            kind = _with_exact_buffers(made)
        model, found = kind.from_pretrained(
            folder,
            config=config,
            attn_implementation=attention,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            # A reward model may have a head with more outputs.
            ignore_mismatched_sizes=value,
        )
    lacking = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    for name in [one for one in lacking if value and not one.startswith(f"{model.base_model_prefix}.")]:
        # A new critic values everything at 0.
        model.get_parameter(name).data.zero_()
        lacking.remove(name)
    # transformers would initialise missing weights randomly and only warn.
    if lacking:
        missing = ", ".join(sorted(lacking)[:3])
        raise UsageError(f"the model in {folder} cannot be loaded: it lacks {missing}")
    if not torch.cuda.is_available():
        _move_out_of_files(model)
    return _for_training(model, settings)


def without_weights(folder: Path, settings: TrainerSettings, *, value: bool = False) -> PreTrainedModel:
    """The model of `load` with parameters that take no memory yet (device "meta"), for those that will hold a part of each."""
    # Buffers, which no folder has, stay.
    with init_empty_weights(include_buffers=False):
        model = from_config(folder, settings, value=value)
    model.tie_weights()
    return model


@torch.no_grad()
def fill(
    model: PreTrainedModel,
    folder: Path,
    settings: TrainerSettings,
    processes: Processes,
    *,
    value: bool = False,
) -> None:
    """Give each process its part of the weights in `folder`, all of which only the first reads. Every process must call this."""
    whole = stored_weights(folder, settings, value=value) if processes.is_main else {}
    # A buffer is no parameter, but it can be a weight too: the bias of a router, for example.
    for name, one in distinct(model.state_dict(keep_vars=True)).items():
        weight = torch.zeros(one.shape, dtype=one.dtype, device=processes.device)
        if processes.is_main:
            weight.copy_(whole[name])
        part = local_part(one, rank=0, world=1)
        part.data.copy_(part.box.of(processes.from_main(weight), (0,) * weight.dim()))


def stored_weights(folder: Path, settings: TrainerSettings, *, value: bool = False) -> dict[str, Tensor]:
    """All weights of a model by name, for a process that hands them out: parameters in the folder's own precision, which saves memory, and
    buffers in float32, because they are not trained in another one. Raises UsageError."""
    weights: dict[str, Tensor] = load(folder, settings, "auto", value=value).state_dict()
    return weights


def from_config(folder: Path, settings: TrainerSettings, *, value: bool = False) -> PreTrainedModel:
    """The model of `load` as its configuration makes it, before it has the weights of the folder. Raises UsageError."""
    with _naming(folder):
        config, kind = _kind(folder, value=value)
        attention = attention_for(config, settings, _class_of(config, kind))
        model = kind.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return _for_training(model, settings)


def architecture(folder: Path) -> PreTrainedModel:
    """The model in `folder` without any weights or buffers: what it is made of, and what transformers calls that. Raises UsageError."""
    with _naming(folder), torch.device("meta"):
        config, kind = _kind(folder, value=False)
        found: PreTrainedModel = kind.from_config(config)
    return found


def config_of(folder: Path) -> transformers.PretrainedConfig:
    """The configuration of the model in `folder`. Raises UsageError."""
    with _naming(folder):
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Raises UsageError for what transformers raises."""
    try:
        yield
    except _UNLOADABLE as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {_first_sentence(error)}") from None


def _kind(folder: Path, *, value: bool) -> tuple[transformers.PretrainedConfig, Any]:
    """A folder's configuration, and the transformers class that makes all of its model. For some families the one for text makes the
    decoder alone. Raises UsageError."""
    config = config_of(folder)
    if value:
        config.num_labels = 1
        return config, transformers.AutoModelForTokenClassification
    if sees(config.to_dict()):
        return config, transformers.AutoModelForImageTextToText
    return config, transformers.AutoModelForCausalLM


def _class_of(config: transformers.PretrainedConfig, kind: Any) -> type[PreTrainedModel]:
    """The class of the model that transformers' class for a kind of model makes of a configuration. Raises ValueError."""
    found = kind._model_mapping.get(type(config), None)
    if found is None:
        raise ValueError(f"{kind.__name__} of transformers knows no {config.model_type} model")
    made: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return made


def _with_exact_buffers(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class whose models load their buffers in float32, whatever the precision of their parameters. transformers' own ones round some
    families' buffers to that precision."""

    def post_init(self: PreTrainedModel) -> None:
        kind.post_init(self)
        stored = self.state_dict(keep_vars=True).items()
        self._keep_in_fp32_modules_strict |= {name for name, one in stored if not isinstance(one, Parameter)}

    return type(kind.__name__, (kind,), {"post_init": post_init})


def decoder_of(model: PreTrainedModel) -> Module:
    """The part of a model that reads and writes text, and for a vision model without its output head."""
    found: Module = model.get_decoder() if sees(model.config.to_dict()) else model
    return found


def vision_parameters(model: PreTrainedModel) -> list[Parameter]:
    """The parameters of a model beside its decoder and its output head."""
    if not sees(model.config.to_dict()):
        return []
    head = model.get_output_embeddings()
    language = {*decoder_of(model).parameters(), *(head.parameters() if head is not None else ())}
    return [one for one in model.parameters() if one not in language]


def _first_sentence(error: Exception) -> str:
    """Its first line, and the next one too if the first only announces it."""
    first, *more = str(error).splitlines() or [type(error).__name__]
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def _move_out_of_files(model: PreTrainedModel) -> None:
    """Copy each weight into memory that PyTorch allocates. What is computed on an accelerator is copied there in any case.

    safetensors maps files, so a weight's address depends on the length of its file's header. How MKL adds up the product of a matrix and
    a single token's vector depends on the matrix's alignment, so one and the same policy would train to other last bits from other files.
    """
    for one in (*model.parameters(), *model.buffers()):
        one.data = one.data.clone()


def _for_training(model: PreTrainedModel, settings: TrainerSettings) -> PreTrainedModel:
    disable_dropout(model)
    for one in vision_parameters(model) if settings.freeze == "vision" else ():
        one.requires_grad_(False)
    checkpointing = settings.gradient_checkpointing
    if torch.cuda.is_available() if checkpointing is None else checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def attention_for(
    config: transformers.PretrainedConfig, settings: TrainerSettings, made: type[PreTrainedModel]
) -> str:
    """Which of transformers' attentions computes what the model's does. Raises UsageError for flash-attention where it is not there."""
    if settings.attention == "flash_attention_2":
        if not transformers.utils.is_flash_attn_2_available():
            raise UsageError(
                "trainer.attention=flash_attention_2: needs the package flash-attn and a supported GPU on this node; "
                "install it, or use trainer.attention=sdpa"
            )
        if not made._supports_flash_attn:
            raise UsageError(
                f"trainer.attention=flash_attention_2: transformers has none for {made.__name__}; use trainer.attention=sdpa"
            )
        return settings.attention
    # PyTorch's scaled_dot_product_attention knows no cap on attention's scores, and transformers would leave it out. Nor does it know the
    # sinks of gpt-oss; transformers refuses to load such a family with it.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped or not made._supports_sdpa else settings.attention


def disable_dropout(model: PreTrainedModel) -> None:
    """The engine samples without dropout, so the trainer's log-probabilities must be without it too."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
