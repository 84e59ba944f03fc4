"""Inspects a Hugging Face model folder for serving. Reads only headers, no weights.

Also chooses vLLM's parser for a model's tool calls, by the markup that the model's chat template writes for them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsbarrier.errors import ProgramFailed
from fsbarrier.store import reading

INDEX = "model.safetensors.index.json"

# A configuration in transformers' format; its keys depend on the model.
Config = Mapping[str, object]
# The shape of each tensor in the weight files.
Shapes = dict[str, list[int]]

# The parts of a multimodal model that can be neither trained nor kept here, as transformers' configurations call them (`audio_config` …).
_OTHER_PARTS = (
    "audio",
    "video",
    "speech",
    "talker",
    "thinker",
    "code2wav",
    "token2wav",
    "encoder",
    "vq",
)

# Configuration keys that describe how the model was saved, not the model itself.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
#: the parser of the most usual format: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`
USUAL = "hermes"
# Parser, marks, tokens. The first parser whose marks are all in the template is chosen; a mark is a token or a text of the format. Without
# the tokens in the last column, vLLM would not start with this parser.
_FORMATS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("deepseek_v32", ("｜DSML｜",), ()),
    (
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "```json"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",), ()),
    ("minimax_m2", ("<minimax:tool_call>",), ()),
    ("seed_oss", ("<seed:tool_call>",), ()),
    ("openai", ("<|channel|>", "<|call|>"), ()),
    ("gemma4", ("<|tool_call>",), ()),
    ("functiongemma", ("<start_function_call>",), ()),
    ("glm45", ("<arg_key>",), ()),
    ("qwen3_coder", ("<tool_call>", "<function="), ()),
    ("lfm2", ("<|tool_call_start|>",), ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),
    ("olmo3", ("<function_calls>",), ()),
    ("llama3_json", ("<|python_tag|>",), ("<|python_tag|>",)),
    ("phi4_mini_json", ("functools[",), ()),
    ("hermes", ("<tool_call>",), ()),
    ("granite", ("<|tool_call|>",), ()),
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder. `signature`: equal for two folders if the weights of one can be loaded into the running model of the other;
    None if unknown (weights that are not safetensors). `parameters`: number of parameters; 0: unknown."""

    path: Path
    config: Config
    tied: bool
    signature: str | None
    parameters: int

    @property
    def max_positions(self) -> int | None:
        """The maximum sequence length in tokens; None if the configuration does not specify it, or scales it."""
        return max_positions(self.config)

    @property
    def cache_bytes_per_token(self) -> int:
        """The size of a token in the KV cache, in 4-byte floats. Without information about grouped heads this is an upper
        bound."""
        text = text_config(self.config)
        layers, heads = number(text, "num_hidden_layers", 32), number(text, "num_attention_heads", 32)
        width = number(text, "head_dim", 0) or number(text, "hidden_size", 4096) // max(1, heads)
        return 2 * 4 * layers * number(text, "num_key_value_heads", heads) * width


def max_positions(config: Config) -> int | None:
    """`ModelFolder.max_positions`, from the configuration."""
    text = text_config(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "?"
    longest = text.get("max_position_embeddings")
    return longest if isinstance(longest, int) and kind in ("default", None) else None


def within_positions(wanted: int, positions: int | None) -> int:
    """A sequence length, limited by the model's positions if they are known."""
    return min(wanted, positions or wanted)


def inspect(path: Path) -> ModelFolder:
    """Inspect the folder `path`, resolving links. Raises ProgramFailed naming the invalid file."""
    folder = path.resolve()
    config = reading.json_object(folder / "config.json", ProgramFailed)
    shapes = _shapes(weight_files(folder))
    parameters = sum(math.prod(shape) for shape in (shapes or {}).values())
    return ModelFolder(folder, config, _tied(config, shapes), _signature(config, shapes), parameters)


def classifies(model: ModelFolder) -> bool:
    """Whether it has a classifier head, so that vLLM serves it with the pooling runner."""
    names = model.config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, according to its index if there is one. Raises ProgramFailed if one is missing."""
    index = folder / INDEX
    if index.is_file():
        names = reading.json_object(index, ProgramFailed).get("weight_map")
        if not isinstance(names, Mapping):
            raise ProgramFailed(f"{index}: has no weight_map")
        files = [folder / Path(name).name for name in sorted({str(name) for name in names.values()})]
    else:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        what = f"{missing[0].name} is missing" if missing else "no weights (*.safetensors)"
        raise ProgramFailed(f"{folder}: {what}; not a complete model folder")
    return files


def _shapes(files: list[Path]) -> Shapes | None:
    """None for weights that are not safetensors, because inspecting a pickle means loading it."""
    if any(file.suffix != ".safetensors" for file in files):
        return None
    return {name: entry["shape"] for file in files for name, entry in tensors_in(file)[1].items()}


def tensors_in(file: Path) -> tuple[int, dict[str, Any]]:
    """The header of a safetensors file: the offset of its data, and each tensor's dtype, shape and data_offsets.

    Raises ProgramFailed, also if the file size does not match its header.
    """
    try:
        with reading.open_stream(file, links=True) as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= reading.TENSOR_HEADER_BYTES:
                raise ValueError("no header")
            header = json.loads(stream.read(length))
            size = stream.seek(0, 2)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != 8 + length + end:
            raise ValueError(f"{size} bytes instead of {8 + length + end}")
        shapes = [entry["shape"] for entry in header.values()]
        if not all(
            isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) for shape in shapes
        ):
            raise ValueError("a tensor whose shape is not a list of numbers")
        return 8 + length, header
    except OSError as error:
        raise ProgramFailed(f"{file}: cannot read the file: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ProgramFailed(f"{file}: damaged: {error}") from None


def _tied(config: Config, shapes: Shapes | None) -> bool:
    """Whether the output head is tied to the embedding. If the configuration does not say so, check the folder for a separate head."""
    tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    if isinstance(tied, bool):
        return tied
    return shapes is None or not any(name.endswith("lm_head.weight") for name in shapes)


def _signature(config: Config, shapes: Shapes | None) -> str | None:
    """A digest of configuration and shapes, without dtypes: vLLM converts each weight to the dtype it serves."""
    if shapes is None:
        return None
    return hashlib.sha256(json.dumps([_essential(config), shapes], sort_keys=True).encode()).hexdigest()


def _essential(config: Config) -> Config:
    """A configuration, and those of its parts, without incidental keys."""
    kept = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    return {name: _essential(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def sees(config: Config) -> bool:
    """Whether a model takes images, by its configuration."""
    return isinstance(config.get("vision_config"), Mapping)


def placeholder_ids(config: Config) -> list[int]:
    """The tokens in whose places a model's images and videos stand. Such a token in an answer would be taken for an image, so they are
    banned when sampling, and in the trainer's distribution too."""
    names = (f"{what}_token_{how}" for what in ("image", "video") for how in ("id", "index"))
    return [token for name in names if sees(config) and isinstance(token := config.get(name), int)]


def untrainable_parts(config: Config) -> list[str]:
    """The parts of a model beside text decoder and vision encoder, such as "audio", by its configuration. The trainer would lose them."""
    parts = (name.removesuffix("_config") for name, value in config.items() if isinstance(value, Mapping))
    return [part for part in parts if part in _OTHER_PARTS]


def text_config(config: Config) -> Config:
    """The text part of a multimodal model's configuration."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def number(config: Config, name: str, otherwise: int) -> int:
    """A positive integer in the configuration, else `otherwise`."""
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else otherwise


def parser_of(folder: Path, wanted: str | None) -> str:
    """The parser for the model in `folder`; `wanted`: the user's choice."""
    return wanted or recognised(folder) or USUAL


def recognised(folder: Path) -> str | None:
    """The parser of the model in `folder`, by its template; None if the template has no known format."""
    template = template_of(folder) or ""
    fitting = (tool_format for tool_format in _FORMATS if all(mark in template for mark in tool_format[1]))
    name, _, needed = next(fitting, ("", (), ()))
    if needed:
        added = object_in(folder / "tokenizer.json").get("added_tokens")
        texts = (
            {token.get("content") for token in added if isinstance(token, dict)}
            if isinstance(added, list)
            else set()
        )
        if not texts.issuperset(needed):
            return None
    return name or None


def template_of(folder: Path) -> str | None:
    """The text of a folder's chat template; the one called "default" if there are several; None if there is none."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    if (folder / "chat_template.json").is_file():
        template = object_in(folder / "chat_template.json").get("chat_template")
        return template if isinstance(template, str) else None
    template = object_in(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def object_in(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model's folder; empty if the file is missing or is not one."""
    try:
        return reading.json_object(path, ValueError)
    except ValueError:
        return {}
