"""Tiny models of the families that people train, each with its family's real architecture and random weights, written as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_bench import letters

#: what all of them share; a family's own configuration ignores what it does not know
COMMON: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
    **{"initializer_range": 0.3, "tie_word_embeddings": False},
    **{"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0},
}
EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
#: two groups of experts, of which a token uses one
GROUPS = {"n_group": 2, "topk_group": 1}
#: DeepSeek's attention, in which the keys and values of all heads are made of one latent vector
LATENT: dict[str, Any] = {
    **{"q_lora_rank": None, "kv_lora_rank": 32, "num_key_value_heads": 2, "head_dim": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32},
}
#: layers of linear attention, and one of the usual kind
LINEAR: dict[str, Any] = {
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
#: by the name of the class of transformers
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Qwen3Next": {**EXPERTS, **LINEAR, **SHARED_EXPERT},
    "Qwen3_5Text": LINEAR,
    "Qwen3_5MoeText": {**EXPERTS, **LINEAR, **SHARED_EXPERT},
    "Llama": {},
    "Gemma3Text": {"sliding_window": 32},
    "Gemma4Text": {"sliding_window": 32, "hidden_size_per_layer_input": 16},
    "Mistral": {},
    "Ministral3": {},
    "Olmo3": {"sliding_window": 32},
    "SmolLM3": {},
    "Phi3": {"num_key_value_heads": 2},
    "Glm4": {},
    "Glm4Moe": {**EXPERTS, **GROUPS},
    # vLLM reads the bias of the router only with this name of the way in which it chooses.
    "DeepseekV3": {**EXPERTS, **GROUPS, **LATENT, "topk_method": "noaux_tc"},
    "MiniMaxM2": {**EXPERTS, "rotary_dim": 16},
    "GptOss": EXPERTS,
    "Granite": {},
    "GraniteMoeHybrid": {
        **{**EXPERTS, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
        **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16},
    },
    "Nemotron": {},
    "NemotronH": {
        **{"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 4},
        **{"mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16},
    },
}


def write_family(name: str, folder: Path, *, seed: int = 1) -> Any:
    """A model of this family, with a tokenizer of letters. The biases of its routers are neither zero nor equal."""
    import torch
    import transformers

    tokenizer = letters()
    torch.manual_seed(seed)
    size = len(tokenizer)
    parts = {**COMMON, **FAMILIES[name], "vocab_size": size, "vocab_size_per_layer_input": size}
    config = getattr(transformers, f"{name}Config")(**parts)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for buffer in model.state_dict(keep_vars=True).values():
        # A scalar is a constant of the architecture, such as Gemma's scale of embeddings.
        if not isinstance(buffer, torch.nn.Parameter) and buffer.dim() and buffer.is_floating_point():
            buffer.copy_(torch.randn(buffer.shape) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
