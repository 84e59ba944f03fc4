"""What a plan computes: a model's sizes from its configuration, the memory of an update, and which way of sharding fits."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fsbarrier.cli import main
from fsbarrier.planning import plan_text
from fsbarrier.planning.cluster_plan import Cluster, ClusterPlan, make_plan
from fsbarrier.planning.memory import GIB, UpdateLoad, Zero, choose_sharding
from fsbarrier.planning.model_shape import SIZES, ModelShape
from fsbarrier.settings.resolve import resolve

pytestmark = pytest.mark.torch

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


@cache
def _measured(config: str) -> ModelShape:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fsbarrier.training.architecture import measure

    said = json.loads(config)
    with torch.device("meta"):
        return measure(AutoModelForCausalLM.from_config(AutoConfig.for_model(said.pop("model_type"), **said)))


def shape_of(config: dict[str, Any]) -> ModelShape:
    """Measured here, in the process of the tests, on the model that transformers makes."""
    return _measured(json.dumps(config))


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
    assert shape_of(config).parameters == parameters


def load(config: dict[str, Any], **more: Any) -> UpdateLoad:
    shape = shape_of(config)
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
    assert here.on_host == 0 and optimizer.on_host == here.parts["moments"]
    # For its step they come back, all at once; by then the activations are gone.
    step = {name: here.parts[name] for name in ("weights", "gradients", "moments", "overhead")}
    assert {name: size for name, size in optimizer.parts.items() if size} == step
    assert optimizer.total == sum(step.values()) < here.total
    assert everything.on_host == here.parts["moments"] + here.parts["weights"] + here.parts["gradients"]
    assert everything.parts["weights"] == everything.parts["gradients"] == 0


# --- arithmetic done by hand -------------------------------------------------------------------------------------------------

# Two layers of width 4: 2 * 4 * (4 + 4) in attention, 3 * 4 * 8 behind it, two norms of 4; embedding and head 10 * 4, a last norm.
TINY = {
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
BLOCK, COUNT = 64 + 96 + 8, 2 * 168 + 4 + 80


def held(config: dict[str, Any], **more: Any) -> tuple[int, ...]:
    parts = load(config, **more).parts
    return parts["weights"], parts["gathered"], parts["gradients"], parts["moments"]


@pytest.mark.parametrize(
    ("stage", "element", "offload", "by_hand"),
    [
        # What it computes with, whole, and a third of the float32 weights; the bucket is larger than the model.
        (1, 4, "none", (4 * 420 + 4 * 140, 0, 4 * 420, 8 * 140)),
        (1, 2, "none", (2 * 420 + 4 * 140, 0, 6 * 420, 8 * 140)),
        (2, 2, "none", (2 * 420 + 4 * 140, 0, 4 * 300 + 4 * 140, 8 * 140)),
        (3, 2, "none", (2 * 140 + 4 * 140, 2 * 200, 4 * 300 + 4 * 140, 8 * 140)),
        # The optimizer steps on the host, and has its weights and their gradients there.
        (2, 2, "optimizer", (2 * 420, 0, 4 * 300, 0)),
        (3, 2, "all", (0, 2 * 200, 4 * 300, 0)),
    ],
)
def test_each_stage_of_zero_shards_more(
    stage: int, element: int, offload: str, by_hand: tuple[int, ...]
) -> None:
    assert shape_of(TINY).parameters == COUNT == 420
    chosen = {
        "shards": 3,
        "element": element,
        "offload": offload,
        "zero": Zero(stage, bucket=300, gathered=200),
    }
    assert held(TINY, **chosen) == by_hand
    moments, exact, computed_with = 8 * 140, 4 * 140 + 4 * 140, 2 * 140
    wanted = {"none": 0, "optimizer": moments + exact, "all": moments + exact + computed_with}[offload]
    assert load(TINY, **chosen).on_host == wanted


def test_a_file_says_how_deepspeed_shards(tmp_path: Path) -> None:
    assert Zero.of_file(None) == Zero(3, 500_000_000, 10**9)
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7, "stage3_max_live_parameters": "auto"}}'
    )
    assert Zero.of_file(str(file)) == Zero(2, 50_000_000, 10**9)


def test_what_is_offloaded_whole_is_gathered_to_be_computed_with() -> None:
    """Also where one process has it all and computes in float32."""
    block = 168
    assert held(TINY, element=4, offload="all") == (0, block * (2 * 4 + 4 + 4), 0, 0)
    assert held(TINY, element=4) == (4 * 420, 0, 4 * 420, 8 * 420)


def test_a_reference_policy_counts_where_it_is_the_most() -> None:
    """It is there before the first step only, without gradients and what the backward pass needs."""
    shape = shape_of(QWEN_7B)
    count, rank_16 = 7_615_616_512, 40_370_176
    lora = {"trained": rank_16, "checkpointing": False}
    without, beside = load(QWEN_7B, **lora), load(QWEN_7B, **lora, reference=True)
    # All layers' activations take more than a second copy of the policy in bfloat16.
    assert beside.parts == without.parts
    lora = {"trained": rank_16, "tokens": 2048, "logits": 256}
    parts = load(QWEN_7B, **lora, reference=True).parts
    layer = 2048 * (2 * (8 * 3584 + 3 * 3584 + 4 * 512 + 4 * 18944) + 8 * 3584)
    assert parts == {
        "weights": 2 * count + 4 * rank_16,
        "gathered": 0,
        "gradients": 0,
        "moments": 8 * rank_16,
        "reference": 2 * count,
        "activations": layer,
        "logits": 256 * 152064 * 8,
        "overhead": 2 * GIB,
    }
    # Sharded it is in float32, and of two units at a time there is all.
    sharded = load(QWEN_7B, **lora, reference=True, shards=8).parts
    assert sharded["reference"] == 4 * count // 8
    assert sharded["gathered"] == 2 * 2 * shape.largest_unit
    # Where everything is trained, moments and gradients take more than it.
    assert "reference" not in load(QWEN_7B, reference=True).parts
    assert load(QWEN_7B, **lora, reference=True, shards=8, offload="all").on_host == (
        8 * rank_16 // 8 + (4 * count + 4 * rank_16 + 4 * count) // 8
    )


def test_adapters_train_little_and_hold_the_base_in_the_type_it_computes_in() -> None:
    shape = shape_of(QWEN_7B)
    # Known of rank 16 on all linear layers.
    assert shape.adapter_parameters(16) == 40_370_176
    assert shape.adapter_parameters(16, ("q_proj", "v_proj")) == 28 * 16 * (2 * 3584 + 3584 + 512)
    adapters = load(QWEN_7B, trained=shape.adapter_parameters(16)).parts
    assert adapters["weights"] == 2 * shape.parameters + 4 * 40_370_176
    assert adapters["moments"] == 8 * 40_370_176


def test_auto_shards_no_more_than_it_must() -> None:
    room = 76 * GIB

    def auto(config: dict[str, Any], nodes: int, per_node: int = 8) -> str:
        return choose_sharding(load(config), nodes=nodes, per_node=per_node, available=room)

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
) -> ClusterPlan:
    settings = resolve([], {"num_nodes": nodes, **chosen})
    shape = shape_of(config)
    return make_plan(shape, settings, Cluster(nodes, accelerators, memory))


def test_seven_billion_on_three_nodes() -> None:
    made = plan(QWEN_7B, 3)
    assert made.problems == ()
    # 24 engines could have 64 groups each, and there are 96.
    assert (made.replicas, made.groups_in_flight, made.sequences_in_flight) == (8, 96, 96 * 16)
    many = plan(QWEN_7B, 3, **{"rollout.tasks": 4096})
    assert (many.groups_in_flight, many.sequences_in_flight) == (3 * 8 * 64, 3 * 8 * 64 * 16)
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
        "engine.tensor_parallel_size=1: weights of 135.4 GiB leave room for only 0 tokens in the 68.0 GiB"
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
    assert f"only {memory - 2}.0 GiB are available; the nearest that works: {nearest}" in problem


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


def test_deepspeed_s_stages_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    chosen = {"trainer.backend": "deepspeed", "trainer.deepspeed": str(file)}
    file.write_text('{"zero_optimization": {"stage": 1}}')
    made = plan(QWEN_7B, 3, **chosen)
    assert made.problems == () and (made.world, made.shards, made.copies, made.zero_stage) == (24, 24, 24, 1)
    assert "24 processes, DeepSpeed ZeRO-1: a copy on each" in "\n".join(plan_text.lines(made))
    # 2 + 4/24 bytes a parameter for weights, 4 + 2 for gradients, 8/24 for moments.
    count = 7_615_616_512
    assert made.update["weights"] == 2 * count + 4 * count // 24
    assert made.update["gradients"] == 6 * count and made.update["moments"] == 2 * (4 * count // 24)
    file.write_text('{"zero_optimization": {"stage": 2}}')
    made = plan(QWEN_7B, 3, **chosen)
    assert made.problems == () and made.update["gradients"] == 4 * 500_000_000 + 4 * count // 24
    file.write_text("{}")
    made = plan(QWEN_7B, 3, **chosen)
    assert made.problems == () and made.copies == 1
    assert "24 processes, DeepSpeed ZeRO-3: 1 copy, each over 24" in "\n".join(plan_text.lines(made))


def test_deepspeed_s_nearest_that_works(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    chosen = {"trainer.backend": "deepspeed", "trainer.deepspeed": str(file)}
    file.write_text('{"zero_optimization": {"stage": 1}}')
    (problem,) = plan(QWEN_7B, 3, 60 * GIB, **chosen).problems
    assert problem.startswith("DeepSpeed ZeRO-1: the update needs 6")
    assert problem.endswith(f"the nearest that works: zero_optimization.stage=3 in {file}")
    # The policy stays on the accelerator in the first two stages.
    (problem,) = plan(QWEN3_30B, 1, 60 * GIB, **chosen, **{"trainer.offload": "optimizer"}, **TP8).problems
    assert "trainer.offload=all" not in problem.partition("zero_optimization")[0]


def test_the_copy_of_the_weights_counts_where_it_is_in_memory() -> None:
    # 2 bytes a parameter on each of several nodes, which share a directory over a network.
    assert plan(QWEN_7B, 3).weights_copy == 2 * 7_615_616_512
    assert plan(QWEN_7B, 1).weights_copy == 0
    for place, size in (("none", 0), ("/nvme/weights", 0), ("/dev/shm/mine", 2 * 7_615_616_512)):
        assert plan(QWEN_7B, 3, **{"checkpoint.weights_dir": place}).weights_copy == size
    shown = "\n".join(plan_text.lines(plan(QWEN_7B, 3)))
    assert "of each node 14.2 GiB for a copy of the new weights" in shown


TP8 = {"engine.tensor_parallel_size": 8}


def test_four_billion_on_an_accelerator() -> None:
    """Each figure of Qwen3-4B on one accelerator of 80 GiB, by hand."""
    made = plan(QWEN3_4B, 1, accelerators=1, **{"rollout.max_tokens": 1024})
    count = 4_022_468_096
    assert made.engine["weights"] == 2 * count
    # 36 layers, 8 heads of 128 for keys and for values.
    assert made.cache_tokens == (int(80 * GIB * 0.85) - 2 * count - 2 * GIB) // (2 * 2 * 36 * 8 * 128)
    assert (made.model_bytes, made.trainer_state_bytes) == (2 * count, 12 * count)
    assert made.kept_bytes == 5 * 14 * count
    assert [made.update[name] // count for name in ("weights", "gradients", "moments")] == [4, 4, 8]
    assert made.problems == ()


@pytest.mark.parametrize(
    ("nodes", "shard", "shards", "copies", "micro_batches", "without_group"),
    # Of 256 trajectories a process takes 32, 11 or 1, and four of 2,048 tokens go into a micro-batch.
    [
        *((1, "none", 1, 8, 8, 0), (1, "node", 8, 1, 8, 0), (1, "all", 8, 1, 8, 0)),
        *((3, "none", 1, 24, 3, 0), (3, "node", 8, 3, 3, 0), (3, "all", 24, 1, 3, 0)),
        *((32, "none", 1, 256, 1, 160), (32, "node", 8, 32, 1, 160), (32, "all", 256, 1, 1, 160)),
    ],
)
def test_four_billion_on_many_accelerators(
    nodes: int, shard: str, shards: int, copies: int, micro_batches: int, without_group: int
) -> None:
    """Each figure of Qwen3-4B on nodes of eight accelerators of 80 GB, by hand."""
    made = plan(QWEN3_4B, nodes, int(80e9), **{"trainer.shard": shard})
    count, embedding, tokens = 4_022_468_096, 151_936 * 2560, 8192
    assert (made.world, made.shards, made.copies) == (8 * nodes, shards, copies) and made.problems == ()
    assert (made.micro_batches, made.idle_engines, made.idle_processes) == (micro_batches, without_group, 0)
    assert made.groups_in_flight == 96 and made.update_tokens == 96 * 16 * 2 * 2048
    assert made.update == {
        "weights": 4 * count // shards,
        "gradients": 4 * count // shards,
        "moments": 8 * count // shards,
        # Two in bfloat16, and the gradient of one in bfloat16 and in float32.
        "gathered": (2 + 2 + 2 + 4) * embedding,
        # The input of 36 layers in bfloat16; and of one layer what it keeps, its two norms in float32.
        "activations": tokens * (36 * 2560 * 2 + 2 * (8 * 2560 + 3 * 4096 + 4 * 1024 + 4 * 9728) + 8 * 2560),
        # In float32, with their gradient, for as many positions as half a GiB holds.
        "logits": (512 << 20) // (8 * 151_936) * 8 * 151_936,
        "overhead": 2 * GIB,
    }
    said = "\n".join(plan_text.lines(made))
    assert ("160 of 256 engines have none (rollout.tasks)" in said) == bool(without_group)


@pytest.mark.parametrize(
    ("chosen", "versions"),
    [
        # Three that are kept, one that is written, and the best.
        ({}, 5),
        ({"eval_interval": 0}, 4),
        # The one before the newest stays all the same.
        ({"checkpoint.keep": 1}, 4),
        ({"checkpoint.keep_every": 10}, 5),
        ({"checkpoint.keep_every": 10, "iterations": 100}, 15),
        ({"iterations": 2}, 2),
    ],
)
def test_as_many_versions_count_as_will_be_on_the_disk(chosen: dict[str, Any], versions: int) -> None:
    assert plan(QWEN3_4B, 1, **chosen).kept_bytes == versions * 14 * 4_022_468_096


def test_the_state_of_adapters_has_them_in_float32_in_any_precision() -> None:
    for dtype in ("float32", "bfloat16"):
        made = plan(QWEN_7B, 1, **{"lora.rank": 16, "trainer.dtype": dtype})
        assert made.trainer_state_bytes == 12 * 40_370_176


def test_processes_without_a_trajectory_are_told() -> None:
    made = plan(QWEN3_4B, 3, int(80e9), **{"trainer.minibatch": 16})
    assert made.idle_processes == 8
    assert "24 processes, shard=none: a copy on each; 8 of them have no trajectory in a step" in "\n".join(
        plan_text.lines(made)
    )


def test_seventy_two_billion_on_eight_nodes() -> None:
    made = plan(QWEN_72B, 8, int(80e9), **TP8)
    count = 72_706_203_648
    assert made.problems == () and (made.world, made.shard, made.shards, made.copies) == (64, "all", 64, 1)
    assert made.update["weights"] + made.update["gradients"] + made.update["moments"] == 16 * count // 64
    assert (made.model_bytes, made.trainer_state_bytes) == (2 * count, 12 * count)
    # Within a node each process would have an eighth: 135 GiB of it alone.
    (problem,) = plan(QWEN_72B, 8, int(80e9), **TP8, **{"trainer.shard": "node"}).problems
    assert problem.endswith("the nearest that works: trainer.shard=all")


@pytest.mark.parametrize(
    ("config", "accelerators", "size", "said"),
    [
        # 28 attention heads are 4 on each of 7, but 4 heads of keys are not a whole number there.
        (
            QWEN_7B,
            7,
            7,
            "28 attention heads, 4 KV heads and a width of 18,944 cannot be split so; .*size=1",
        ),
        (QWEN_7B, 3, 3, "cannot be split so; the nearest that works: engine.tensor_parallel_size=1"),
        (QWEN_7B, 8, 8, "cannot be split so; the nearest that works: engine.tensor_parallel_size=1"),
        # One accelerator stays idle, as no number that divides three splits it.
        (QWEN_72B | {"num_hidden_layers": 40}, 3, 1, "the nearest that works: engine.tensor_parallel_size=2"),
        (QWEN_7B, 3, 4, "exceeds this node's 3 accelerators, .* use 3 or fewer"),
    ],
)
def test_accelerators_in_odd_numbers(config: dict[str, Any], accelerators: int, size: int, said: str) -> None:
    sizes = {"engine.tensor_parallel_size": size}
    problem = plan(config, 64, accelerators=accelerators, **sizes).problems[0]
    assert re.search(said, problem), problem
    if (nearest := problem.rpartition("engine.tensor_parallel_size=")[2]).isdecimal():
        works = plan(config, 64, accelerators=accelerators, **{"engine.tensor_parallel_size": int(nearest)})
        assert not [one for one in works.problems if "tensor_parallel" in one] and works.replicas


def test_an_accelerator_that_no_engine_has_is_told() -> None:
    assert (
        "1 engine a node over 2 accelerators, 1 idle"
        in plan_text.lines(plan(QWEN_7B, 1, accelerators=3, **TP2))[1]
    )
    assert "2 engines a node;" in plan_text.lines(plan(QWEN_7B, 1, accelerators=4, **TP2))[1]


TP2 = {"engine.tensor_parallel_size": 2}


def test_more_than_the_host_has_is_refused_with_what_fits() -> None:
    def on_host(host_gib: int, config: dict[str, Any], memory: int, **chosen: Any) -> tuple[str, ...]:
        settings = resolve([], {"num_nodes": 1, **chosen})
        cluster = Cluster(1, 8, memory * GIB, host_bytes=host_gib * GIB)
        return make_plan(shape_of(config), settings, cluster).problems

    moments = {"trainer.offload": "optimizer"}
    # 8 bytes a parameter of the node together; sharded over the node it fits without.
    (problem,) = on_host(32, QWEN_7B, 80, **moments)
    assert problem == (
        "trainer.offload=optimizer: needs 56.7 GiB of each node's memory, but only 32.0 GiB are available; "
        "the nearest that works: trainer.offload=none or 2 nodes"
    )
    assert on_host(57, QWEN_7B, 80, **moments) == ()
    # What the accelerators lack is not looked for where there is none either: 30 billion take 227 and 455 GiB.
    (problem,) = on_host(128, QWEN3_30B, 48, **TP2)
    assert "offload" not in problem.partition("nearest that works")[2] and " nodes" in problem
    (problem,) = on_host(256, QWEN3_30B, 48, **TP2)
    assert "trainer.offload=optimizer (227.5 GiB of each node's memory)" in problem or " nodes" in problem


def test_impossible_engines_are_told() -> None:
    (problem, *_) = plan(QWEN_7B, 1, **{"engine.tensor_parallel_size": 16}).problems
    assert "cannot span several" in problem
    (problem, *_) = plan(QWEN_7B, 1, **{"engine.tensor_parallel_size": 8}).problems
    assert "engine.tensor_parallel_size=8" in problem and "28 attention heads" in problem


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


def test_a_size_stands_for_a_published_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "Qwen-7B",
        "--nodes",
        "3",
        "--accelerators",
        "8",
        "--accelerator-memory-gb",
        "80",
    ]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("7.62 billion parameters on 3 nodes of 8 accelerators")


def test_a_model_that_transformers_cannot_make_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery", **sizes}))
    assert main(["plan", "--model", str(tmp_path), "--accelerators", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"the model in {tmp_path} cannot be made" in said and "mystery" in said


def test_the_sizes_are_those_of_published_models() -> None:
    sizes = json.loads(SIZES.read_text())
    found = {name: round(shape_of(config).parameters / 1e9, 1) for name, config in sizes.items()}
    assert {name: found[name] for name in ("qwen-7b", "qwen-72b", "qwen3-30b-a3b", "llama-8b")} == {
        "qwen-7b": 7.6,
        "qwen-72b": 72.7,
        "qwen3-30b-a3b": 30.5,
        "llama-8b": 8.0,
    }
    for name, billions in found.items():
        said = float(re.search(r"([\d.]+)[bm]", name.partition("-")[2])[1])  # type: ignore[index]
        assert abs(billions / (said / 1000 if name.endswith("m") else said) - 1) < 0.35, name
