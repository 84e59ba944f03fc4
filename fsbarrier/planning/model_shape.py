"""The sizes of a model that memory depends on, from its config.json, and from the headers of its weights where they are there.

No weight is read and no library loaded. What a configuration leaves out counts as in the Llama family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fsbarrier import reading
from fsbarrier.engine.model import Config, inspect, number, text_config
from fsbarrier.errors import ProgramFailed, UsageError

# Without these nothing can be computed.
_NEEDED = ("hidden_size", "num_hidden_layers", "vocab_size")
# Model types whose attention has biases, or norms of its own, without saying so in the configuration.
_BIASED = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl")
_NORMED = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")
# Gemma's configuration says nothing of its tied head: that is the default there.
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `attention` and `key_value`: the widths of all `heads`, and of all `key_value_heads`.

    `feed_forward`: the width that one token passes through, of all its experts together. `experts`: the parameters of a layer's largest
    tensor of experts, 0 where there are none. `block`: the parameters of one layer.
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    attention: int
    key_value: int
    feed_forward: int
    experts: int
    vocabulary: int
    block: int
    tied: bool
    parameters: int

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def largest_unit(self) -> int:
        """The most parameters that a sharded update gathers at once: a layer, the embedding or the head."""
        return max(self.block, self.embedding)

    @property
    def largest_tensor(self) -> int:
        """The most parameters that one tensor has."""
        return max(self.hidden * max(self.vocabulary, self.feed_forward), self.experts)

    @classmethod
    def of_config(cls, config: Config) -> Self:
        """Raises UsageError naming what the configuration lacks."""
        text = text_config(config)
        missing = [name for name in _NEEDED if not number(text, name, 0)]
        if missing:
            raise UsageError(f"config.json says nothing of {', '.join(missing)}")
        kind = str(text.get("model_type", ""))
        hidden, layers = number(text, "hidden_size", 1), number(text, "num_hidden_layers", 1)
        heads = number(text, "num_attention_heads", max(1, hidden // 128))
        width = number(text, "head_dim", max(1, hidden // heads))
        attention = heads * width
        key_value_heads = number(text, "num_key_value_heads", heads)
        key_value = key_value_heads * width
        feed_forward, feed_forward_parameters, experts = _feed_forward(text, hidden)
        block = 2 * hidden * (attention + key_value) + feed_forward_parameters
        block += hidden * (4 if kind in _FOUR_NORMS else 2)
        if text.get("attention_bias") or kind in _BIASED:
            block += attention + 2 * key_value + (0 if kind in _BIASED else hidden)
        if kind in _NORMED:
            block += 2 * width
        vocabulary = number(text, "vocab_size", 1)
        said = config.get("tie_word_embeddings", text.get("tie_word_embeddings", kind in _TIED))
        tied = bool(said)
        parameters = layers * block + hidden + (1 if tied else 2) * vocabulary * hidden
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            key_value_heads=key_value_heads,
            attention=attention,
            key_value=key_value,
            feed_forward=feed_forward,
            experts=experts,
            vocabulary=vocabulary,
            block=block,
            tied=tied,
            parameters=parameters,
        )

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Of a model folder, whose weights may be missing. Raises UsageError, and ProgramFailed for a file that is damaged."""
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} has no config.json; give a Hugging Face model folder")
        shape = cls.of_config(reading.json_object(folder / "config.json", ProgramFailed))
        if not any(folder.glob("*.safetensors")):
            return shape
        model = inspect(folder)
        # A tied head that the folder holds all the same is no parameter of its own.
        return replace(shape, parameters=model.parameters or shape.parameters)

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """How many numbers low-rank adapters of `rank` have, on the named linear layers of each block; (): on all of them."""
        hidden, attention, kv, wide = self.hidden, self.attention, self.key_value, self.feed_forward
        sides = {
            "q_proj": hidden + attention,
            "k_proj": hidden + kv,
            "v_proj": hidden + kv,
            "o_proj": attention + hidden,
            "gate_proj": hidden + wide,
            "up_proj": hidden + wide,
            "down_proj": wide + hidden,
        }
        return self.layers * rank * sum(sides[name] for name in targets or sides if name in sides)


def _feed_forward(text: Config, hidden: int) -> tuple[int, int, int]:
    """(the width that a token passes through, the parameters of a layer, those of its largest tensor of experts)."""
    experts = number(text, "num_experts", 0) or number(text, "num_local_experts", 0)
    wide = number(text, "intermediate_size", 4 * hidden)
    if not experts:
        return wide, 3 * hidden * wide, 0
    one = number(text, "moe_intermediate_size", wide)
    common = number(text, "shared_expert_intermediate_size", 0)
    chosen = number(text, "num_experts_per_tok", 1)
    parameters = 3 * hidden * (experts * one + common) + hidden * experts + (hidden if common else 0)
    # transformers has the gates and the ups of all experts in one tensor.
    return chosen * one + common, parameters, 2 * hidden * experts * one
