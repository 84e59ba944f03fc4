"""The plan's sizes of a model, from nothing but its configuration, against the models that transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsbarrier.planning.model_shape import ModelShape

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
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"mlp_bias": True, "attention_bias": True}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 24, "attention_bias": True}),
    ("gemma3_text", {"head_dim": 24, "tie_word_embeddings": True}),
    ("glm4", {"head_dim": 24, "attention_bias": True}),
    ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    (
        "qwen2_moe",
        {**QWEN, "shared_expert_intermediate_size": 30, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    ("qwen3_moe", QWEN),
    ("qwen3_moe", {**QWEN, "mlp_only_layers": [0, 3]}),
    ("dots1", GLM),
    ("glm4_moe", GLM),
    ("glm4_moe", {**GLM, "attention_bias": True, "use_qk_norm": True}),
    ("glm4_moe_lite", DEEPSEEK),
    ("glm4_moe_lite", {**DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}),
    ("glm_moe_dsa", SPARSE),
    ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None}),
    ("deepseek_v2", {**DEEPSEEK, "mlp_bias": True}),
    ("deepseek_v3", DEEPSEEK),
    (
        "deepseek_v3",
        {**DEEPSEEK, "attention_bias": True, "tie_word_embeddings": True, "first_k_dense_replace": 0},
    ),
    ("deepseek_v32", SPARSE),
]


def made(folder: Path, kind: str, sizes: dict[str, Any]) -> tuple[Any, ModelShape]:
    """transformers' model, without memory for its weights, and what the plan has of the configuration that transformers writes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES | sizes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, ModelShape.of_folder(folder)


def numbers(model: Any) -> int:
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "sizes"), CASES)
def test_the_parameters_are_those_of_the_real_model(tmp_path: Path, kind: str, sizes: dict[str, Any]) -> None:
    model, shape = made(tmp_path, kind, sizes)
    assert shape.parameters == numbers(model)
    assert shape.block == max(numbers(layer) for layer in model.model.layers)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("glm4_moe_lite", {**DEEPSEEK, "mlp_layer_types": ["dense", *["sparse"] * 6]}),
        ("glm_moe_dsa", {**SPARSE, "indexer_types": ["full", "shared"] * 3}),
    ],
)
def test_a_model_may_have_fewer_layers_than_its_lists_name(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    """A published configuration with a smaller num_hidden_layers, to try something out. transformers takes it, and does not write it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    said = (
        SIZES | sizes | {"model_type": kind, "num_hidden_layers": 3, "head_dim": LATENT["qk_rope_head_dim"]}
    )
    (tmp_path / "config.json").write_text(json.dumps(said))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert ModelShape.of_folder(tmp_path).parameters == numbers(model)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "sizes", "targets"),
    [
        ("qwen2", {}, ()),
        ("qwen3_moe", QWEN, ("q_proj", "self_attn.o_proj")),
        ("deepseek_v3", DEEPSEEK, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
        ("glm4_moe", GLM, ("v_proj",)),
    ],
)
def test_adapters_have_the_numbers_that_peft_gives_them(
    tmp_path: Path, kind: str, sizes: dict[str, Any], targets: tuple[str, ...]
) -> None:
    from fsbarrier.settings.sections import LoraSettings
    from fsbarrier.training.lora import Adapters

    model, shape = made(tmp_path, kind, sizes)
    Adapters.put_into(model, LoraSettings(rank=4, targets=targets), tmp_path)
    assert shape.adapter_parameters(4, targets) == numbers(model) > 0


# As published, and how many parameters transformers' models of these have.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
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
    shape = ModelShape.of_config(DEEPSEEK_V3)
    assert shape.parameters == 671_026_404_352
    # One latent vector and the rotated part of the key, whatever the number of heads.
    assert (shape.cached, shape.key_value_heads) == (576, 1)
    # A token passes through as much in a layer with experts as in one without.
    assert shape.feed_forward == 18432 and shape.experts == 2 * 7168 * 256 * 2048
