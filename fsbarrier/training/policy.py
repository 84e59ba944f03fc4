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

# transformers raises these if a folder is no model, or its configuration has a wrong value.
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
    """Load the model in `folder`, in `dtype` ("auto": its own, but buffers in float32) and without dropout.

    Raises UsageError if it is incomplete.
    """
    # The progress bar of transformers would fill the log.
    transformers.utils.logging.disable_progress_bar()
    with _naming(folder):
        config, kind = _kind(folder, value=value)
        made = _class_of(config, kind)
        attention = attention_for(config, settings, made)
        if dtype == "auto":
            kind = _with_exact_buffers(made)
        model, loading = kind.from_pretrained(
            folder,
            config=config,
            attn_implementation=attention,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            # A reward model may have a head with more outputs.
            ignore_mismatched_sizes=value,
        )
    missing_weights = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    for name in [
        key for key in missing_weights if value and not key.startswith(f"{model.base_model_prefix}.")
    ]:
        # A new critic values everything at 0.
        model.get_parameter(name).data.zero_()
        missing_weights.remove(name)
    # transformers would initialise missing weights randomly and only warn.
    if missing_weights:
        missing = ", ".join(sorted(missing_weights)[:3])
        raise UsageError(f"the model in {folder} cannot be loaded: it lacks {missing}")
    if not torch.cuda.is_available():
        _move_out_of_files(model)
    return _for_training(model, settings)


def without_weights(folder: Path, settings: TrainerSettings, *, value: bool = False) -> PreTrainedModel:
    """Make the model of `load` with parameters that take no memory yet (device "meta"), for a process that will hold a part of each."""
    # Buffers are made here, because a folder need not contain them.
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
    """Give each process its part of the weights in `folder`, which only the first process reads. Every process must call this."""
    whole = stored_weights(folder, settings, value=value) if processes.is_main else {}
    # Buffers are included, because they can be weights too: the bias of a router, for example.
    for name, tensor in distinct(model.state_dict(keep_vars=True)).items():
        weight = torch.zeros(tensor.shape, dtype=tensor.dtype, device=processes.device)
        if processes.is_main:
            weight.copy_(whole[name])
        part = local_part(tensor, rank=0, world=1)
        part.data.copy_(part.box.of(processes.from_main(weight), (0,) * weight.dim()))


def stored_weights(folder: Path, settings: TrainerSettings, *, value: bool = False) -> dict[str, Tensor]:
    """Load all weights of a model by name, for the process that distributes them. Parameters keep the folder's precision, which saves
    memory; buffers are in float32, which training uses for them. Raises UsageError."""
    weights: dict[str, Tensor] = load(folder, settings, "auto", value=value).state_dict()
    return weights


def from_config(folder: Path, settings: TrainerSettings, *, value: bool = False) -> PreTrainedModel:
    """Make the model of `load` from its configuration, without the weights of the folder. Raises UsageError."""
    with _naming(folder):
        config, kind = _kind(folder, value=value)
        attention = attention_for(config, settings, _class_of(config, kind))
        model = kind.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return _for_training(model, settings)


def architecture(folder: Path) -> PreTrainedModel:
    """Make the model in `folder` without memory for weights or buffers, to examine its modules and their names. Raises UsageError."""
    with _naming(folder), torch.device("meta"):
        config, kind = _kind(folder, value=False)
        model: PreTrainedModel = kind.from_config(config)
    return model


def config_of(folder: Path) -> transformers.PretrainedConfig:
    """The configuration of the model in `folder`. Raises UsageError."""
    with _naming(folder):
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn an error of transformers into a UsageError that names the folder."""
    try:
        yield
    except _UNLOADABLE as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {_first_sentence(error)}") from None


def _kind(folder: Path, *, value: bool) -> tuple[transformers.PretrainedConfig, Any]:
    """Return a folder's configuration, and transformers' auto class that makes the whole model: for some families the one for text makes
    the decoder alone. Raises UsageError."""
    config = config_of(folder)
    if value:
        config.num_labels = 1
        return config, transformers.AutoModelForTokenClassification
    if sees(config.to_dict()):
        return config, transformers.AutoModelForImageTextToText
    return config, transformers.AutoModelForCausalLM


def _class_of(config: transformers.PretrainedConfig, kind: Any) -> type[PreTrainedModel]:
    """The model class that transformers' auto class `kind` chooses for a configuration. Raises ValueError."""
    listed = kind._model_mapping.get(type(config), None)
    if listed is None:
        raise ValueError(f"{kind.__name__} of transformers knows no {config.model_type} model")
    made: type[PreTrainedModel] = listed[0] if isinstance(listed, tuple) else listed
    return made


def _with_exact_buffers(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class whose models load their buffers in float32, whatever the precision of their parameters. The original
    classes round some families' buffers to that precision."""

    def post_init(self: PreTrainedModel) -> None:
        kind.post_init(self)
        stored = self.state_dict(keep_vars=True).items()
        self._keep_in_fp32_modules_strict |= {
            name for name, tensor in stored if not isinstance(tensor, Parameter)
        }

    return type(kind.__name__, (kind,), {"post_init": post_init})


def decoder_of(model: PreTrainedModel) -> Module:
    """The part of a model that reads and writes text; for a vision model, without its output head."""
    decoder: Module = model.get_decoder() if sees(model.config.to_dict()) else model
    return decoder


def vision_parameters(model: PreTrainedModel) -> list[Parameter]:
    """The parameters of a vision model outside its decoder and its output head; [] for other models."""
    if not sees(model.config.to_dict()):
        return []
    head = model.get_output_embeddings()
    language = {*decoder_of(model).parameters(), *(head.parameters() if head is not None else ())}
    return [parameter for parameter in model.parameters() if parameter not in language]


def _first_sentence(error: Exception) -> str:
    """The first line of an error, and the next one too if the first only announces it."""
    first, *more = str(error).splitlines() or [type(error).__name__]
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def _move_out_of_files(model: PreTrainedModel) -> None:
    """Copy each weight into memory that PyTorch allocates. (With an accelerator, weights are copied to it in any case.)

    safetensors maps files, so a weight's address depends on the length of its file's header. MKL's order of additions in the product of a
    matrix and a single token's vector depends on the matrix's alignment, so the same policy would train to different last bits if its
    weights came from different files.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _for_training(model: PreTrainedModel, settings: TrainerSettings) -> PreTrainedModel:
    disable_dropout(model)
    for parameter in vision_parameters(model) if settings.freeze == "vision" else ():
        parameter.requires_grad_(False)
    checkpointing = settings.gradient_checkpointing
    if torch.cuda.is_available() if checkpointing is None else checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def attention_for(
    config: transformers.PretrainedConfig, settings: TrainerSettings, made: type[PreTrainedModel]
) -> str:
    """Choose an attention of transformers that computes what the model defines. Raises UsageError if flash-attention is not available."""
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
    # PyTorch's scaled_dot_product_attention cannot cap attention scores, and transformers would leave the cap out. It has no attention
    # sinks (gpt-oss) either; transformers refuses to load such a family with it.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped or not made._supports_sdpa else settings.attention


def disable_dropout(model: PreTrainedModel) -> None:
    """Turn dropout off: the engine samples without it, so the trainer's log-probabilities must be computed without it too."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
