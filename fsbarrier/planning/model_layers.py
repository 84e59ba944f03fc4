"""What the layers of a decoder are made of, from its configuration: attention, and a feed-forward part with experts or without. Pure.

What a configuration leaves out counts as in the Llama family. The counts are those of the models that transformers makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsbarrier.engine.model import Config, number

# Model types whose attention has biases, or norms of its own, without saying so in the configuration.
_BIASED = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl")
_NORMED = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text", "dots1")
# Those that have no bias after attention, where their configuration says that attention has biases.
_NO_BIAS_AFTER = (*_BIASED, "glm", "glm4", "glm4_moe")
# Those of which the first layer alone has no experts, unless `mlp_layer_types` says otherwise.
_FIRST_IS_DENSE = ("glm4_moe_lite",)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """A part of a layer. `linear`: the input and output width of each linear layer, by the last part of its name. `others`: the
    parameters beside their weights: biases, norms, experts and what chooses among them."""

    linear: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    others: int = 0

    @property
    def parameters(self) -> int:
        return sum(taken * given for taken, given in self.linear.values()) + self.others

    def adapter_sides(self, name: str) -> int:
        """How many numbers an adapter of rank 1 has on the layer `name`."""
        return sum(self.linear.get(name, ()))


@dataclass(frozen=True, slots=True)
class Attention:
    """`width` and `key_value`: the widths of all `heads`, and of all heads of keys; their mean with values, where these differ.

    `cached`: the numbers that the engine keeps of a token, `cached_heads`: over how many of its accelerators it may split them.
    """

    part: LayerPart
    heads: int
    width: int
    key_value: int
    cached: int
    cached_heads: int


@dataclass(frozen=True, slots=True)
class FeedForward:
    """`width`: that one token passes through, of all its experts together. `experts`: the parameters of the largest tensor of
    experts, 0 where there are none."""

    part: LayerPart
    width: int
    experts: int = 0


def attention(text: Config, hidden: int) -> Attention:
    """Of each layer."""
    return _latent_attention(text, hidden) if number(text, "kv_lora_rank", 0) else _attention(text, hidden)


def _attention(text: Config, hidden: int) -> Attention:
    kind = str(text.get("model_type", ""))
    heads = number(text, "num_attention_heads", max(1, hidden // 128))
    one = number(text, "head_dim", max(1, hidden // heads))
    key_value_heads = number(text, "num_key_value_heads", heads)
    width, key_value = heads * one, key_value_heads * one
    others = 0
    if text.get("attention_bias") or kind in _BIASED:
        others += width + 2 * key_value + (0 if kind in _NO_BIAS_AFTER else hidden)
    if text.get("use_qk_norm") or kind in _NORMED:
        others += 2 * one
    linear = {
        "q_proj": (hidden, width),
        "k_proj": (hidden, key_value),
        "v_proj": (hidden, key_value),
        "o_proj": (width, hidden),
    }
    return Attention(LayerPart(linear, others), heads, width, key_value, 2 * key_value, key_value_heads)


def _latent_attention(text: Config, hidden: int) -> Attention:
    """DeepSeek's: keys and values are made of one latent vector, which is what an engine keeps, the same for all heads."""
    heads, latent = number(text, "num_attention_heads", 1), number(text, "kv_lora_rank", 1)
    rotated, value = number(text, "qk_rope_head_dim", 0), number(text, "v_head_dim", 0)
    fixed, query_latent = number(text, "qk_nope_head_dim", 0), number(text, "q_lora_rank", 0)
    query = heads * (fixed + rotated)
    linear = {
        "kv_a_proj_with_mqa": (hidden, latent + rotated),
        "kv_b_proj": (latent, heads * (fixed + value)),
        "o_proj": (heads * value, hidden),
    }
    if query_latent:
        linear |= {"q_a_proj": (hidden, query_latent), "q_b_proj": (query_latent, query)}
    else:
        linear["q_proj"] = (hidden, query)
    others = query_latent + latent
    if text.get("attention_bias"):
        others += query_latent + latent + rotated + hidden
    width, key_value = max(query, heads * value), (query + heads * value) // 2
    return Attention(LayerPart(linear, others), heads, width, key_value, latent + rotated, 1)


def indexer(text: Config, hidden: int, layers: int) -> tuple[LayerPart, int]:
    """What chooses the tokens that a layer attends to (DeepSeek-V3.2, GLM-5), and how many of the layers have one."""
    heads, width = number(text, "index_n_heads", 0), number(text, "index_head_dim", 0)
    if not heads or not width:
        return LayerPart(), 0
    linear = {
        "wq_b": (number(text, "q_lora_rank", 0), heads * width),
        "wk": (hidden, width),
        "weights_proj": (hidden, heads),
    }
    said = text.get("indexer_types")
    return LayerPart(linear, 2 * width), said[:layers].count("full") if isinstance(said, list) else layers


def feed_forwards(text: Config, hidden: int, layers: int) -> list[tuple[FeedForward, int]]:
    """Each kind that the model has, and how many of its layers have it."""
    sparse = _layers_with_experts(text, layers)
    kinds = [(_dense(text, hidden), layers - sparse), (_with_experts(text, hidden), sparse)]
    return [(kind, count) for kind, count in kinds if count]


def _dense(text: Config, hidden: int) -> FeedForward:
    wide = number(text, "intermediate_size", 4 * hidden)
    return FeedForward(
        LayerPart(_gated(hidden, wide), 2 * wide + hidden if text.get("mlp_bias") else 0), wide
    )


def _with_experts(text: Config, hidden: int) -> FeedForward:
    experts = _experts(text)
    one = number(text, "moe_intermediate_size", number(text, "intermediate_size", 4 * hidden))
    others = 3 * hidden * experts * one + hidden * experts
    common = number(text, "shared_expert_intermediate_size", 0)
    if common:
        # It has a gate of its own.
        linear = {**_gated(hidden, common), "shared_expert_gate": (hidden, 1)}
    else:
        common = number(text, "n_shared_experts", 0) * one
        linear = _gated(hidden, common) if common else {}
        others += 2 * common + hidden if common and text.get("mlp_bias") else 0
    width = number(text, "num_experts_per_tok", 1) * one + common
    # transformers has the gates and the ups of all experts in one tensor.
    return FeedForward(LayerPart(linear, others), width, 2 * hidden * experts * one)


def _gated(hidden: int, wide: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden)}


def _experts(text: Config) -> int:
    """How many experts a layer chooses from; their number has three names."""
    return max(number(text, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _layers_with_experts(text: Config, layers: int) -> int:
    if not _experts(text):
        return 0
    kinds = text.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds[:layers].count("sparse")
    if text.get("model_type") in _FIRST_IS_DENSE:
        return layers - 1
    named = text.get("mlp_only_layers")
    dense = named if isinstance(named, list) else []
    every = number(text, "decoder_sparse_step", 1)
    first = number(text, "first_k_dense_replace", 0)
    return sum(at >= first and at not in dense and not (at + 1) % every for at in range(layers))
