"""What a plan computes: a model's sizes from its configuration, the memory of an update, and which way of sharding fits."""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import typed

from fsbarrier.planning import cluster_plan
from fsbarrier.planning.cluster_plan import Cluster, ClusterPlan, make_plan
from fsbarrier.planning.memory import GIB, UpdateLoad
from fsbarrier.planning.model_shape import SIZES, ModelShape
from fsbarrier.planning.publication import Publication
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import LoraSettings

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
QWEN3_VL_4B = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": QWEN3_4B,
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
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


#: without adapters
WHOLE = LoraSettings()


@cache
def _measured(config: str, lora: LoraSettings) -> ModelShape:
    from fsbarrier.training.architecture import shape_of as measured

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        return measured(Path(folder), lora)


def shape_of(config: dict[str, Any], lora: LoraSettings = WHOLE) -> ModelShape:
    """Measured here, in the process of the tests, on the model that transformers makes."""
    return _measured(json.dumps(config), lora)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN_7B, 7_615_616_512),
        (QWEN_72B, 72_706_203_648),
        (QWEN3_4B, 4_022_468_096),
        (QWEN3_30B, 30_532_122_624),
        (LLAMA_8B, 8_030_261_248),
        (GEMMA3_1B, 999_885_952),
        (QWEN3_VL_4B, 4_437_815_808),
    ],
)
def test_parameters_are_counted_from_the_configuration(config: dict[str, Any], parameters: int) -> None:
    assert shape_of(config).parameters == parameters


def load(config: dict[str, Any], **more: Any) -> UpdateLoad:
    shape = shape_of(config)
    fields = {"shards": 1, "element": 2, "tokens": 16384, "logits": 2048}
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


def test_a_vision_encoder_that_is_not_trained_has_neither_gradients_nor_moments() -> None:
    """The language model of Qwen3-VL 4B is Qwen3 4B."""
    language = 4_022_468_096
    shape = shape_of(QWEN3_VL_4B)
    assert shape.vision == 4_437_815_808 - language
    parts = load(QWEN3_VL_4B, frozen=shape.vision).parts
    assert (parts["weights"], parts["gradients"]) == (4 * shape.parameters, 4 * language)
    assert load(QWEN3_VL_4B).parts["moments"] - parts["moments"] == 8 * shape.vision


# --- a run on a cluster -----------------------------------------------------------------------------------------------------


def plan(
    config: dict[str, Any], nodes: int, memory: int = 80 * GIB, accelerators: int = 8, **chosen: Any
) -> ClusterPlan:
    settings = resolve([], {"num_nodes": nodes, **chosen})
    shape = shape_of(config, settings.lora)
    return make_plan(shape, settings, Cluster(nodes, accelerators, memory))


def test_seven_billion_on_three_nodes() -> None:
    made = plan(QWEN_7B, 3)
    assert made.problems == ()
    assert (made.rollout.replicas, made.world, made.shard, made.load.shards, made.copies) == (
        8,
        24,
        "node",
        8,
        3,
    )
    assert (made.optimizer_steps, made.load.tokens) == (12, 8192)
    assert made.checkpoint.model == 2 * 7_615_616_512 and made.checkpoint.trainer_state == 12 * 7_615_616_512
    # 28 layers, 4 heads of 128 for keys and for values, in bfloat16: 57,344 bytes a token.
    assert made.rollout.cache_tokens == made.rollout.parts["key-value cache"] // 57_344
    assert made.load.total <= made.available < 80 * GIB


@pytest.mark.parametrize(
    ("nodes", "memory", "chosen", "nearest"),
    [
        (3, 80, {"trainer.shard": "none"}, "trainer.shard=all"),
        (1, 48, {}, "trainer.max_tokens_per_micro_batch=2048 trainer.offload=all"),
        (1, 8, {}, "more nodes, or accelerators with more memory"),
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


def test_what_is_called_the_nearest_does_work() -> None:
    chosen: dict[str, Any] = {"engine.tensor_parallel_size": 8}
    (problem,) = plan(QWEN3_30B, 1, 40 * GIB, **chosen).problems
    for word in problem.partition("the nearest that works: ")[2].partition(" (")[0].split():
        key, _, text = word.partition("=")
        chosen[key] = int(text) if text.isdecimal() else text
    assert plan(QWEN3_30B, 1, 40 * GIB, **chosen).problems == ()


def test_deepspeed_s_stages_are_told_apart() -> None:
    chosen: dict[str, object] = {"trainer.backend": "deepspeed"}
    count = 7_615_616_512
    for stage in (1, 2):
        made = plan(QWEN_7B, 3, **chosen, **{"trainer.zero_stage": stage})
        assert made.problems == () and (made.world, made.load.shards, made.copies) == (24, 24, 24)
        assert f"24 processes, DeepSpeed ZeRO-{stage}: a copy on each" in "\n".join(cluster_plan.lines(made))
        # 2 + 4/24 bytes a parameter for weights, 4 for gradients, 8/24 for moments.
        assert made.load.parts["weights"] == 2 * count + 4 * count // 24
        assert made.load.parts["gradients"] == 4 * count and made.load.parts["moments"] == 8 * count // 24
    made = plan(QWEN_7B, 3, **chosen)
    assert made.problems == () and made.copies == 1
    assert made.load.parts == plan(QWEN_7B, 3, **{"trainer.shard": "all"}).load.parts
    assert "24 processes, DeepSpeed ZeRO-3: 1 copy, each over 24" in "\n".join(cluster_plan.lines(made))


@pytest.mark.parametrize(
    ("nodes", "shard", "shards", "copies"),
    [
        *((1, "none", 1, 8), (1, "node", 8, 1), (1, "all", 8, 1)),
        *((3, "none", 1, 24), (3, "node", 8, 3), (3, "all", 24, 1)),
        *((32, "none", 1, 256), (32, "node", 8, 32), (32, "all", 256, 1)),
    ],
)
def test_four_billion_on_many_accelerators(nodes: int, shard: str, shards: int, copies: int) -> None:
    """Each figure of Qwen3-4B on nodes of eight accelerators of 80 GB, by hand."""
    made = plan(QWEN3_4B, nodes, int(80e9), **{"trainer.shard": shard})
    count, embedding, tokens = 4_022_468_096, 151_936 * 2560, 8192
    assert (made.world, made.load.shards, made.copies) == (8 * nodes, shards, copies) and made.problems == ()
    assert made.load.parts == {
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


@pytest.mark.parametrize(
    ("config", "size", "bytes_a_token"),
    [
        # Keys and values of 4 heads of 128 in 28 layers, halved; of 8 heads in 80 layers, each head on its own.
        (QWEN_7B, 2, 28 * 2 * 2 * 128 * 2),
        (QWEN_72B, 8, 80 * 2 * 1 * 128 * 2),
        # Its 4 heads are on 2 of 8 accelerators each.
        (QWEN3_30B, 8, 48 * 2 * 1 * 128 * 2),
    ],
)
def test_an_engines_cache_has_what_weights_and_overhead_leave(
    config: dict[str, Any], size: int, bytes_a_token: int
) -> None:
    chosen = {"engine.tensor_parallel_size": size, "engine.gpu_memory_utilization": 0.8}
    made = plan(config, 2, **chosen)
    count = shape_of(config).parameters
    weights = 2 * count // size
    cache = int(80 * GIB * 0.8) - weights - 2 * GIB
    assert made.rollout.parts == {"weights": weights, "key-value cache": cache, "overhead": 2 * GIB}
    assert made.rollout.cache_tokens == cache // bytes_a_token and made.rollout.replicas == 8 // size


@pytest.mark.parametrize(
    ("keep", "every", "iterations", "eval_interval"),
    [(3, 0, 12, 0), (1, 0, 12, 0), (4, 0, 12, 1), (2, 5, 12, 1), (3, 0, 2, 1)],
)
def test_the_room_for_versions_is_what_a_run_keeps(
    tmp_path: Path, keep: int, every: int, iterations: int, eval_interval: int
) -> None:
    """A run writes version after version, and removes old ones as it does: the most that are there at a time."""
    folder, most = tmp_path / "checkpoints", 0
    best = "policy-000001.g0001" if eval_interval else None
    for version in range(1, iterations + 1):
        written = folder / f"policy-{version:06d}.g0001"
        (written / "model").mkdir(parents=True)
        (written / "model" / "weights").write_bytes(b"w")
        checkpoints.write_manifest(written, version)
        most = max(most, len([*folder.iterdir()]))
        retention.remove_old_versions(tmp_path, keep, written, every, best)
    chosen = {"checkpoint.keep": keep, "checkpoint.keep_every": every, "iterations": iterations}
    made = plan(QWEN_7B, 3, **chosen, eval_interval=eval_interval).checkpoint
    versions = made.kept // (made.model + made.trainer_state)
    # Of those that are kept for good the newest may be one of the newest.
    assert versions * (made.model + made.trainer_state) == made.kept and 0 <= versions - most <= (every > 0)


@pytest.mark.parametrize(
    ("config", "accelerators", "size", "said"),
    [
        # 28 attention heads are 4 on each of 7, but 4 heads of keys are not a whole number there.
        (QWEN_7B, 7, 7, "28 attention heads and 4 KV heads cannot be split so; .*size=1"),
        (QWEN_7B, 3, 3, "cannot be split so; the nearest that works: engine.tensor_parallel_size=1"),
        (QWEN_7B, 8, 8, "cannot be split so; the nearest that works: engine.tensor_parallel_size=1"),
        # One accelerator stays idle, as no number that divides three splits it.
        (QWEN_72B | {"num_hidden_layers": 40}, 3, 1, "the nearest that works: engine.tensor_parallel_size=2"),
        (QWEN_7B, 3, 4, "exceeds this node's 3 accelerators; use 3 or fewer"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(
    config: dict[str, Any], accelerators: int, size: int, said: str
) -> None:
    sizes = {"engine.tensor_parallel_size": size}
    problem = plan(config, 64, accelerators=accelerators, **sizes).problems[0]
    assert re.search(said, problem), problem
    if (nearest := problem.rpartition("engine.tensor_parallel_size=")[2]).isdecimal():
        works = plan(config, 64, accelerators=accelerators, **{"engine.tensor_parallel_size": int(nearest)})
        assert not [one for one in works.problems if "tensor_parallel" in one] and works.rollout.replicas


@pytest.mark.usefixtures("warm_programs")
def test_the_command_plans_for_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    there = ["plan", "--model", str(tmp_path), "--accelerators", "8", "--accelerator-memory-gb", "80"]
    told = json.loads(typed(*there, "--nodes", "3", "--json").out)
    assert (told["load"]["shape"]["parameters"], told["world"], told["rollout"]["replicas"]) == (
        4_022_468_096,
        24,
        8,
    )
    assert told["cluster"] == {"nodes": 3, "accelerators": 8, "memory_bytes": 80_000_000_000}
    (tmp_path / "run.toml").write_text("num_nodes = 2\n[engine]\ntensor_parallel_size = 2\n")
    told = json.loads(typed(*there, "--config", tmp_path / "run.toml", "--json").out)
    assert (told["world"], told["rollout"]["replicas"]) == (16, 4)
    output = typed(
        *there, "--nodes", "1", "trainer.shard=none", "trainer.max_tokens_per_micro_batch=65536", code=2
    )
    assert "8 processes, shard=none: a copy on each" in output.out
    assert (
        output.err.startswith("fsbarrier: error: trainer.shard=none: the update needs ")
        and output.err.count("\n") == 1
    )


def test_what_is_offloaded_held_beside_or_not_trained_changes_the_memory() -> None:
    def planned(config: dict[str, Any] = QWEN_7B, **chosen: Any) -> ClusterPlan:
        values = {name.replace("__", "."): value for name, value in chosen.items()}
        return plan(config, 1, **{"trainer.shard": "none", **values})

    whole = 4 * 7_615_616_512
    away = planned(trainer__offload="all")
    assert (away.load.parts["weights"], away.host) == (0, 8 * 4 * whole)
    assert planned(trainer__offload="all", algorithm__kl_coef=0.1).load.parts["reference"] == whole // 2
    adapters = planned(lora__rank=8, lora__targets=["q_proj"])
    assert adapters.load.parts["moments"] == 2 * adapters.load.parts["gradients"] < whole // 1000
    text = "\n".join(
        cluster_plan.lines(planned(engine__replicas=3, trainer__minibatch=64, trainer__shard="node"))
    )
    assert "3 engines a node over 3 accelerators, 5 idle" in text and "micro-batches of" in text
    assert "with 80.0 GiB" in text and "weights 3.5 GiB, " in text
    # A trainer of one's own has needs of its own.
    assert planned().problems and not planned(trainer__command="true {out}").problems
    # Of all processes of a node together: weights, gradients and moments, 16 bytes a parameter.
    (problem,) = planned(QWEN_72B, engine__tensor_parallel_size=4).problems
    assert "trainer.offload=all (1083.4 GiB of each node's memory)" in problem


def test_what_an_update_moves_and_what_a_lost_node_costs() -> None:
    """A delta of a twentieth at 1e-6 between whole versions, one in ten; the trainer's state with the whole ones, or where nodes cannot
    hold it, with each; adapters with each, alone."""
    weights, state = 2 * 7_615_616_512, 12 * 7_615_616_512

    def moved(**chosen: Any) -> tuple[Publication, list[str]]:
        named = {name.replace("__", "."): value for name, value in chosen.items()}
        made = plan(QWEN_7B, 3, **{"optimizer.lr": 1e-6, **named})
        return made.publication, [line for line in cluster_plan.lines(made) if "lost node" in line]

    delta, (cost,) = moved()
    assert (delta.kind, delta.usual, delta.repeated) == ("delta", weights // 20, 9)
    assert delta.mean == pytest.approx((weights + 9 * weights / 20 + state) / 10, rel=1e-6)
    assert (
        "costs at most 9 updates, trained again from stored batches (none with checkpoint.trainer_every=1)"
        in cost
    )
    for chosen in ({"trainer__backend": "deepspeed"}, {"algorithm__advantage": "gae"}):
        both, (cost,) = moved(**chosen)
        assert both.kind == "delta" and "costs no finished update" in cost
        assert both.mean == pytest.approx((weights + 9 * weights / 20) / 10 + both.state, rel=1e-6)
        assert moved(trainer__keep="process", **chosen)[0].repeated == 9
    assert moved(checkpoint__trainer_every=1)[0].mean == pytest.approx(weights * 1.45 / 10 + state, rel=1e-6)
    for chosen in (
        {"checkpoint__weights_dir": "none"},
        {"checkpoint__whole_every": 1},
        {"trainer__command": "true"},
    ):
        assert moved(**chosen)[0].kind == "whole" and moved(**chosen)[0].mean == weights + state
    for serve in ("merged", "adapter"):
        lora = {"lora__rank": 32, "lora__serve": serve}
        adapters, (cost,) = moved(**lora)
        assert adapters.kind == "adapters" and adapters.mean == 4 * adapters.usual < weights // 10
        assert "costs no finished update" in cost
        # On disk: two kept versions, one that is made, and the best one, all of adapters; and a whole one at a session's end.
        named = {name.replace("__", "."): value for name, value in lora.items()}
        kept = plan(QWEN_7B, 3, **named, **{"checkpoint.keep": 2}).checkpoint.kept
        assert kept == weights + 4 * 4 * adapters.usual
        without = moved(checkpoint__weights_dir="none", **lora)[0].kind
        assert without == ("whole" if serve == "merged" else "adapters")


def test_a_critic_is_a_second_model_with_all_that_training_takes() -> None:
    """Of Qwen2.5-7B without its output head, on 24 accelerators: 16 bytes a parameter, but gradients only of the model that computes."""
    critic = 7_615_616_512 - 152_064 * 3584 + 3584 + 1
    alone, both = (plan(QWEN_7B, 3, **{"algorithm.advantage": name}) for name in ("grpo", "gae"))
    assert both.load.parts["critic"] == pytest.approx(12 * critic / 8, rel=1e-6)
    assert {**both.load.parts, "critic": 0} == {**alone.load.parts, "critic": 0}
    assert both.checkpoint.critic == 2 * critic and both.checkpoint.model == alone.checkpoint.model
    assert both.checkpoint.trainer_state - alone.checkpoint.trainer_state == 12 * critic
    away = {"algorithm.advantage": "gae", "trainer.offload": "all", "trainer.shard": "all"}
    assert plan(QWEN_7B, 3, **away).host == pytest.approx(16 * (7_615_616_512 + critic) / 3, rel=1e-6)


@pytest.mark.usefixtures("warm_programs")
def test_each_role_is_planned_on_the_accelerators_that_it_has() -> None:
    there = [
        "plan",
        "--model",
        "qwen-7b",
        "--nodes",
        "4",
        "--accelerators",
        "8",
        "--accelerator-memory-gb",
        "80",
    ]
    placed = [
        "placement.rollout=0-15",
        "placement.update=24-31",
        "placement.judge=20-23",
        "engines.judge.model=qwen-32b",
    ]
    told = typed(*there, *placed, "engines.judge.tensor_parallel_size=4").out
    assert "rollouts      8 engines a node on 2 nodes" in told and "update        8 processes" in told
    assert "judge         1 engine a node on 1 node\n  each accelerator: weights 15.3 GiB" in told
    said = typed(*there, *placed, "engines.judge.gpu_memory_utilization=0.5", code=2).err
    assert "engines.judge.tensor_parallel_size=1: there is room for 0 tokens" in said
    assert "the nearest that works: engines.judge.tensor_parallel_size=2" in said
    said = typed(*there, "placement.update=32", code=2)
    assert "placement.update=32: there is no accelerator 32" in said.err


@pytest.mark.usefixtures("warm_programs")
def test_a_size_stands_for_a_published_model() -> None:
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
    said = typed(*words)
    assert said.out.startswith("7.62 billion parameters on 3 nodes of 8 accelerators")


@pytest.mark.usefixtures("warm_programs")
def test_a_model_that_transformers_cannot_make_is_one_line(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery", **sizes}))
    said = typed("plan", "--model", tmp_path, "--accelerators", "0", code=2).err
    assert said.count("\n") == 1 and f"the model in {tmp_path} cannot be loaded" in said and "mystery" in said


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
