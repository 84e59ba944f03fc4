"""What a plan computes: a model's sizes from its configuration, the memory of an update, and which way of sharding fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_engine_parts import write_model

from fsbarrier.cli import main
from fsbarrier.errors import UsageError
from fsbarrier.planning.cluster_plan import Cluster, Plan, make_plan
from fsbarrier.planning.memory import GIB, UpdateLoad, choose_shard
from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings.resolve import resolve

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
    # Two units in bfloat16, and the gradient of one in both types.
    assert sharded["gathered"] == parts["gathered"] == 10 * 152064 * 3584
    assert load(QWEN_7B, element=4).parts["gathered"] == 0
    # 64 of the 80 GB that one answer of 16,384 tokens would take without it.
    whole = load(QWEN_7B, checkpointing=False).parts["activations"]
    assert parts["activations"] * 10 < whole


def test_what_is_offloaded_is_on_the_host_and_not_on_the_accelerator() -> None:
    here, optimizer, everything = (load(QWEN_7B, offload=how) for how in ("none", "optimizer", "all"))
    assert here.on_host == 0 and optimizer.parts["moments"] == 0
    assert optimizer.on_host == here.parts["moments"]
    # For its step they come back, all at once; by then the activations are gone.
    step = sum(here.parts[name] for name in ("weights", "gradients", "moments", "overhead"))
    assert sum(optimizer.parts.values()) < optimizer.total == step < here.total
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


# --- a run on a cluster -----------------------------------------------------------------------------------------------------


def plan(
    config: dict[str, Any], nodes: int, memory: int = 80 * GIB, accelerators: int = 8, **chosen: Any
) -> Plan:
    settings = resolve([], {"num_nodes": nodes, **chosen})
    shape = ModelShape.of_config(config)
    return make_plan(shape, settings, Cluster(nodes, accelerators, memory))


def test_seven_billion_on_three_nodes() -> None:
    made = plan(QWEN_7B, 3)
    assert made.problems == ()
    assert (made.replicas, made.groups_in_flight, made.sequences_in_flight) == (
        8,
        3 * 8 * 64,
        3 * 8 * 64 * 16,
    )
    assert (made.world, made.shard, made.shards, made.copies) == (24, "node", 8, 3)
    assert (made.trajectories, made.optimizer_steps) == (96 * 16, 12)
    # 256 trajectories over 24 processes are 11 at most, four of 2,048 tokens in a micro-batch of 8,192.
    assert (made.micro_batch_tokens, made.micro_batches) == (8192, 3)
    assert made.model_bytes == 2 * 7_615_616_512 and made.trainer_state_bytes == 12 * 7_615_616_512
    # 28 layers, 4 heads of 128 for keys and for values, in bfloat16: 57,344 bytes a token.
    assert made.cache_tokens == made.engine["key-value cache"] // 57_344
    assert made.update_bytes <= made.available < 80 * GIB


def test_seventy_two_billion_fits_only_on_several_accelerators() -> None:
    (problem,) = plan(QWEN_72B, 32).problems
    assert problem.startswith(
        "engine.tensor_parallel_size=1: weights of 135.4 GiB leave room for 0 tokens in the 68.0 GiB"
    )
    assert problem.endswith("the nearest that works: engine.tensor_parallel_size=4")
    made = plan(QWEN_72B, 32, **{"engine.tensor_parallel_size": 4})
    assert made.problems == () and (made.replicas, made.world, made.shard) == (2, 256, "all")


@pytest.mark.parametrize(
    ("nodes", "memory", "chosen", "nearest"),
    [
        (3, 80, {"trainer.shard": "none"}, "trainer.shard=all"),
        (1, 48, {}, "trainer.max_tokens_per_micro_batch=2048 trainer.offload=all"),
        (1, 8, {}, "none on machines like these"),
    ],
)
def test_what_cannot_be_is_told_with_the_nearest_that_works(
    nodes: int, memory: int, chosen: dict[str, Any], nearest: str
) -> None:
    config = QWEN_7B if nodes > 1 else QWEN3_30B
    sizes = {"engine.tensor_parallel_size": 8}
    problems = plan(config, nodes, memory * GIB, **sizes, **chosen).problems
    (problem,) = [each for each in problems if each.startswith("trainer.shard=")]
    assert f"there are {memory - 2}.0 GiB; the nearest that works: {nearest}" in problem


@pytest.mark.parametrize("way", ["offload", "nodes"])
def test_what_is_called_the_nearest_does_work(way: str) -> None:
    (problem,) = plan(QWEN3_30B, 1, 40 * GIB, **{"engine.tensor_parallel_size": 8}).problems
    settings, _, nodes = problem.partition("the nearest that works: ")[2].partition(" or ")
    chosen: dict[str, Any] = {"engine.tensor_parallel_size": 8}
    if way == "nodes":
        number = int(nodes.split()[0])
        assert plan(QWEN3_30B, number, 40 * GIB, **chosen).problems == ()
        assert plan(QWEN3_30B, number - 1, 40 * GIB, **chosen).problems
        return
    for word in settings.partition(" (")[0].split():
        key, _, text = word.partition("=")
        chosen[key] = int(text) if text.isdecimal() else text
    assert plan(QWEN3_30B, 1, 40 * GIB, **chosen).problems == ()


def test_impossible_engines_are_told() -> None:
    (problem, *_) = plan(QWEN_7B, 1, **{"engine.tensor_parallel_size": 16}).problems
    assert "over several nodes is not supported" in problem
    (problem, *_) = plan(QWEN_7B, 1, **{"engine.tensor_parallel_size": 8}).problems
    assert "engine.tensor_parallel_size=8" in problem and "28 heads" in problem
    host = make_plan(
        ModelShape.of_config(QWEN_7B),
        resolve([], {"num_nodes": 1, "trainer.offload": "optimizer"}),
        Cluster(1, 8, 80 * GIB, host_bytes=32 * GIB),
    )
    assert "needs 56.7 GiB of each node's memory, there are 32.0 GiB" in host.problems[0]


def test_a_dry_run_begins_with_the_plan_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"prompt": "ba=", "answer": "ab"}\n')
    words = [
        "run",
        "--dry-run",
        "--data-path",
        str(tmp_path),
        "--model",
        str(folder),
        "rollout.max_tokens=64",
    ]
    words += ["--log-path", str(tmp_path / "run"), "engine.replicas=2"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("# no plan: config.json says nothing of vocab_size\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 1000}))
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# 0.00 million parameters on 1 node\n# rollouts      2 engines a node;")
    assert "engine: 2 of these, each on accelerators or cores of its own" in shown


def test_the_command_plans_for_a_cluster_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    there = ["plan", "--model", str(tmp_path), "--accelerators", "8", "--accelerator-memory-gb", "80"]
    assert main([*there, "--nodes", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["parameters"], told["world"], told["replicas"]) == (4_022_468_096, 24, 8)
    assert (
        main([*there, "--nodes", "1", "trainer.shard=none", "trainer.max_tokens_per_micro_batch=65536"]) == 2
    )
    output = capsys.readouterr()
    assert "8 processes, shard=none: a copy on each" in output.out
    assert (
        output.err.startswith("fsbarrier: error: trainer.shard=none: the update needs ")
        and output.err.count("\n") == 1
    )
