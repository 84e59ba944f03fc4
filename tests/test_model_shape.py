"""The plan's sizes of a model, measured on the one that transformers makes of its configuration."""

from __future__ import annotations

from typing import Any

import pytest

from fsbarrier.planning.model_shape import ModelShape

pytestmark = pytest.mark.torch

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
GLM = {**EXPERTS, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 2, "head_dim": 24}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
DEEPSEEK = {**GLM, **LATENT, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
SPARSE = {**DEEPSEEK, "index_n_heads": 3, "index_head_dim": 8, "index_topk": 4}
QWEN = {**EXPERTS, "num_experts": 6, "head_dim": 24}


def made(kind: str, sizes: dict[str, Any]) -> tuple[Any, ModelShape]:
    """transformers' model, without memory for its weights, and what is measured on it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fsbarrier.training.architecture import measure

    config = AutoConfig.for_model(kind, **SIZES | sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, measure(model)


def numbers(model: Any) -> int:
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


@pytest.mark.parametrize(
    ("kind", "sizes", "feed_forward", "cached"),
    [
        ("llama", {}, 96, 2 * 2 * 16),
        ("qwen3", {"head_dim": 24}, 96, 2 * 2 * 24),
        ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}, 2 * 96, 2 * 2 * 16),
        ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 30}, 2 * 40 + 30, 2 * 2 * 24),
        ("glm4_moe", GLM, 4 * 40, 2 * 2 * 24),
        ("deepseek_v3", DEEPSEEK, 4 * 40, 12 + 6),
        ("glm_moe_dsa", SPARSE, 4 * 40, 12 + 6),
    ],
)
def test_what_a_token_passes_through_and_leaves_in_the_cache(
    kind: str, sizes: dict[str, Any], feed_forward: int, cached: int
) -> None:
    model, shape = made(kind, sizes)
    assert (shape.feed_forward, shape.cached, shape.layers) == (feed_forward, cached, 5)
    assert shape.block == max(numbers(layer) for layer in model.model.layers)


# As published, and how many parameters transformers' models of these have.
DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}


def test_a_model_with_many_experts_and_latent_attention() -> None:
    _, shape = made("deepseek_v3", DEEPSEEK_V3)
    assert shape.parameters == 671_026_404_352
    # One latent vector and the rotated part of the key, whatever the number of heads.
    assert (shape.cached, shape.key_value_heads) == (576, 1)
    # A token passes through as much in a layer with experts as in one without.
    assert shape.feed_forward == 18432
