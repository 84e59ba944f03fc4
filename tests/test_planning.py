"""What a plan computes: a model's sizes from its configuration, the memory of an update, and which way of sharding fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_engine_parts import write_model

from fsbarrier.errors import UsageError
from fsbarrier.planning.memory import GIB, UpdateLoad, choose_shard
from fsbarrier.planning.model_shape import ModelShape

# Public configurations, and how many parameters their checkpoints really have.
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN_72B = QWEN_7B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
}
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_30B = QWEN3_4B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
LLAMA_8B = QWEN_7B | {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "vocab_size": 262144,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN_7B, 7_615_616_512),
        (QWEN_72B, 72_706_203_648),
        (QWEN3_4B, 4_022_468_096),
        (QWEN3_30B, 30_532_122_624),
        (LLAMA_8B, 8_030_261_248),
        (GEMMA3_1B, 999_885_952),
    ],
)
def test_parameters_are_counted_from_the_configuration(config: dict[str, Any], parameters: int) -> None:
    assert ModelShape.of_config(config).parameters == parameters


def test_weights_that_are_there_say_how_many_parameters_there_are(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    assert ModelShape.of_folder(folder).parameters < 1000
    (folder / "model.safetensors").unlink()
    assert ModelShape.of_folder(folder).parameters == 7_615_616_512
    with pytest.raises(UsageError, match="says nothing of hidden_size, num_hidden_layers, vocab_size"):
        ModelShape.of_config({"model_type": "mystery"})


def load(config: dict[str, Any], **more: Any) -> UpdateLoad:
    shape = ModelShape.of_config(config)
    fields = {"shards": 1, "element": 2, "tokens": 16384, "logits": 2048, "trained": shape.parameters}
    return UpdateLoad(shape, **{**fields, "checkpointing": True, **more})


def test_an_update_takes_what_training_in_mixed_precision_takes() -> None:
    parts = load(QWEN_7B).parts
    count = 7_615_616_512
    assert (parts["weights"], parts["gradients"], parts["moments"]) == (4 * count, 4 * count, 8 * count)
    assert parts["logits"] == 2048 * 152064 * 8
    sharded = load(QWEN_7B, shards=8).parts
    assert sharded["weights"] + sharded["gradients"] + sharded["moments"] == 2 * count
    assert sharded["gathered"] < parts["gathered"] == 2 * count
    # 64 of the 80 GB that one answer of 16,384 tokens would take without it.
    whole = load(QWEN_7B, checkpointing=False).parts["activations"]
    assert parts["activations"] * 10 < whole


def test_what_is_offloaded_is_on_the_host_and_not_on_the_accelerator() -> None:
    here, optimizer, everything = (load(QWEN_7B, offload=how) for how in ("none", "optimizer", "all"))
    assert here.on_host == 0 and optimizer.parts["moments"] == 0
    assert optimizer.on_host == here.parts["moments"]
    assert everything.on_host == here.parts["moments"] + here.parts["weights"] + here.parts["gradients"]
    assert everything.parts["weights"] == everything.parts["gradients"] == 0


def test_adapters_train_little_and_hold_the_base_in_the_type_it_computes_in() -> None:
    shape = ModelShape.of_config(QWEN_7B)
    # Known of rank 16 on all linear layers.
    assert shape.adapter_parameters(16) == 40_370_176
    assert shape.adapter_parameters(16, ("q_proj", "v_proj")) == 28 * 16 * (2 * 3584 + 3584 + 512)
    adapters = load(QWEN_7B, trained=shape.adapter_parameters(16)).parts
    assert adapters["weights"] == 2 * shape.parameters + 4 * 40_370_176
    assert adapters["moments"] == 8 * 40_370_176


def test_auto_shards_no_more_than_it_must() -> None:
    room = 76 * GIB

    def auto(config: dict[str, Any], nodes: int, per_node: int = 8) -> str:
        return choose_shard(load(config), nodes=nodes, per_node=per_node, available=room)

    one_billion = GEMMA3_1B
    assert auto(one_billion, 3) == "none"
    assert auto(QWEN_7B, 3) == "node"
    assert auto(QWEN_72B, 32) == "all"
    # On one node, all its processes are all there are; on nodes of one process, there is nothing to shard within.
    assert auto(QWEN_72B, 1) == "node"
    assert auto(QWEN_7B, 8, per_node=1) == "all"
    assert auto(QWEN_7B, 1, per_node=1) == "none"
