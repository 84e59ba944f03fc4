"""Updates and checkpoints of several processes, PyTorch's and DeepSpeed's: resumed by any others, killed at each stage."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks import run_script
from trainer_bench import bench, largest_difference

from fsbarrier.errors import UsageError
from fsbarrier.planning.memory import UpdateLoad
from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings.sections import TrainerSettings

PLACES = ("1x1", "1x2", "2x1", "1x3", "3x1", "1x4", "2x2", "4x1")
MIB = 1 << 20


@pytest.mark.torch
def test_the_update_is_the_same_replicated_and_sharded(tmp_path: Path) -> None:
    run_script(
        "parallel_updates.py",
        tmp_path,
        *(f"{case}:clip:steps" for case in ("2x1:none:3", "2x2:node:5")),
        "3x1:all:1:steps:critic",
    )


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", ["none", "node", "all"])
def test_the_update_is_the_same_in_every_way(tmp_path: Path, shard: str) -> None:
    # A node of one process has nothing to shard within it.
    places = [place for place in PLACES if shard != "node" or place[-1] != "1"]
    cases = [f"{place}:{shard}:{size}" for place in places for size in (1, 4, 7)]
    bf16 = [f"{place}:{shard}:4:bf16" for place in places]
    run_script(
        "parallel_updates.py",
        tmp_path / "untied",
        *cases,
        *bf16,
        *(f"1x2:{shard}:4:{more}" for more in ("optimizer", "all", "clip", "steps", "checkpointing")),
        f"2x2:{shard}:4:clip:steps",
    )
    tied = [f"{place}:{shard}:4" for place in ("1x3", "2x2")]
    run_script("parallel_updates.py", tmp_path / "tied", "tied", *tied, f"2x2:{shard}:4:clip:steps")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_adapters_and_budgets_of_tokens_make_the_same_update_on_one_two_and_three_processes(
    tmp_path: Path,
) -> None:
    cases = [f"1x{world}:{shard}:20t" for world in (1, 2, 3) for shard in ("none", "all")]
    more = [f"1x2:{shard}:9t:lora:bf16" for shard in ("none", "all")]
    more += [f"2x2:{shard}:4:lora" for shard in ("none", "node", "all")]
    more += [f"2x2:{shard}:4:critic:steps" for shard in ("none", "node", "all")]
    more += ["1x2:all:4:critic:bf16", "1x2:all:4:critic:all", "1x2:none:4:critic:optimizer"]
    more += ["2x2:node:4:lora:clip:steps"]
    run_script("parallel_updates.py", tmp_path, *cases, *(f"{case}:lora" for case in cases), *more)


@pytest.mark.torch
def test_a_routers_bias_is_in_the_update_and_in_what_is_published(tmp_path: Path) -> None:
    run_script("published_parts.py", tmp_path, "MiniMaxM2", "1x2:all:4:bf16", "1x2:auto:4:zero3:bf16")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("family", ["Glm4Moe", "DeepseekV3", "MiniMaxM2"])
def test_a_routers_bias_is_published_in_every_sharding(tmp_path: Path, family: str) -> None:
    cases = [f"{case}:4{more}" for case in ("1x2:all", "2x2:node", "1x2:none") for more in ("", ":bf16")]
    cases += [f"1x2:auto:4:zero{stage}{more}" for stage in (1, 3) for more in ("", ":bf16")]
    run_script("published_parts.py", tmp_path, family, *cases)


@pytest.mark.torch
def test_a_process_that_holds_shards_never_has_the_model_whole(tmp_path: Path) -> None:
    import torch
    from trainer_bench import tiny_model

    from fsbarrier.training import policy

    tiny_model(tmp_path)
    whole = policy.load(tmp_path, TrainerSettings())
    empty = policy.without_weights(tmp_path, TrainerSettings())
    assert all(one.is_meta for one in empty.parameters())
    buffers = dict(whole.named_buffers())
    assert buffers and all(torch.equal(one, buffers[name]) for name, one in empty.named_buffers())
    # What follows is made as ever.
    assert not torch.nn.Linear(2, 2).weight.is_meta


def layout_for(by_node: tuple[int, ...], memory_mib: int = 10**6, **chosen: Any) -> Any:
    from fsbarrier.training.sharding import choose_layout

    sizes = {name: 1024 for name in ModelShape.__slots__}
    shape = ModelShape(**{**sizes, "layers": 1, "block": 2**24, "parameters": 2**28, "trained": 2**28})
    load = UpdateLoad(shape, shards=1, element=4, tokens=1, logits=1)
    processes: Any = SimpleNamespace(
        world=sum(by_node), processes_by_node=by_node, memory_bytes=lambda: memory_mib * MIB
    )
    return choose_layout(replace(TrainerSettings(), **chosen), processes, lambda: load)


@pytest.mark.torch
def test_a_node_shares_a_copy_or_all_do() -> None:
    assert layout_for((2, 2), shard="node").shards == 2
    assert layout_for((2, 2), shard="all").shards == 4
    assert layout_for((2, 2), shard="none").shards == 1
    assert layout_for((4,), shard="node").shards == 4
    # The last node left is still sharded over all of its processes, even if that is one.
    assert layout_for((1,), shard="all").shards == 1


@pytest.mark.torch
def test_what_cannot_be_sharded_within_a_node_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"trainer.shard=node: .*different numbers of processes \(2, 1\)"):
        layout_for((2, 1), shard="node")


@pytest.mark.torch
def test_auto_shards_as_little_as_fits() -> None:
    """2**28 parameters take 4 GiB of state beside what every process needs."""
    assert layout_for((2, 2), memory_mib=8000).shards == 1
    assert layout_for((2, 2), memory_mib=5000).shards == 2
    assert layout_for((2, 2), memory_mib=4000).shards == 4
    assert layout_for((2, 1), memory_mib=5000).shards == 3


# --- checkpoints ----------------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_any_processes_go_on_from_what_any_others_left_and_a_killed_one_leaves_nothing_half(
    tmp_path: Path,
) -> None:
    run_script("checkpoint_ranks.py", tmp_path, 1, "reshard=2", "damage=10", "kill=1")


@pytest.mark.torch
@pytest.mark.slow
def test_a_tied_embedding_of_which_a_process_has_no_row(tmp_path: Path) -> None:
    run_script("zero_checkpoints.py", tmp_path, "tied", "1x4:all:5", "1x2:all:5")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "cases",
    [
        ["3x2:node:5", "2x2:all:5", "1x3:none:5", "1x1:none:5"],
        ["3x2:all:5:bf16", "2x2:node:5:bf16", "1x3:all:5:bf16", "1x1:none:5:bf16"],
        ["3x2:auto:5:zero3", "2x2:auto:5:zero2", "1x3:all:5", "1x1:none:5"],
    ],
    ids=["float32", "bfloat16", "zero3"],
)
def test_what_the_trainer_saved_on_three_nodes_is_read_on_fewer(tmp_path: Path, cases: list[str]) -> None:
    run_script("zero_checkpoints.py", tmp_path, *cases)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_saves_and_loads_of_any_processes_many_times(tmp_path: Path, seed: int) -> None:
    run_script(
        "checkpoint_ranks.py",
        tmp_path,
        100 + seed,
        "reshard=25",
        "damage=200",
        "kill=25",
    )


# --- DeepSpeed ------------------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_zero_3_makes_the_same_update_and_goes_on_bit_by_bit_on_one_process_and_on_two_again(
    tmp_path: Path,
) -> None:
    cases = ("1x2:auto:5:zero3", "1x1:auto:5:zero1", "1x2:auto:5:zero1")
    run_script("zero_checkpoints.py", tmp_path, "update", *cases)


@pytest.mark.torch
@pytest.mark.slow
def test_a_state_of_zero_3_goes_on_bit_by_bit_on_other_processes_and_in_other_stages(tmp_path: Path) -> None:
    run_script("zero_checkpoints.py", tmp_path, "1x2:auto:5:zero3", "3x1:auto:5:zero1", "1x2:all:5")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_processes_that_stay_make_the_updates_of_those_that_load_anew(tmp_path: Path, stage: int) -> None:
    case = f"1x2:auto:5:zero{stage}"
    run_script(
        "kept_updates.py",
        tmp_path,
        case,
        f"{case}:bf16",
        f"{case}:optimizer",
        f"1x3:auto:4:zero{stage}",
        f"1x1:auto:5:zero{stage}",
    )


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "first",
    ["1x3:auto:5:zero1", "2x1:auto:5:zero2", "1x2:auto:5:zero3:bf16", "1x2:all:5", "1x2:auto:5:zero1:bf16"],
)
def test_any_state_goes_on_in_any_stage(tmp_path: Path, first: str) -> None:
    more = ":bf16" * first.endswith("bf16")
    readers = [f"1x{world}:auto:5:zero{stage}{more}" for world in (1, 2, 3) for stage in (1, 2, 3)]
    run_script("zero_checkpoints.py", tmp_path, first, *readers, f"1x3:all:5{more}", f"1x1:none:5{more}")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_makes_the_same_update_in_every_way(tmp_path: Path, stage: int) -> None:
    cases = [
        f"{place}:auto:{size}:zero{stage}"
        for place in ("1x1", "1x2", "1x3", "1x4", "2x1", "2x2", "3x1")
        for size in (1, 4, 7, "20t")
    ]
    offloads = ("optimizer", "all") if stage == 3 else ("optimizer",)
    extras = ("bf16", "checkpointing", "clip", "steps", "clip:steps", *offloads)
    cases += [f"{place}:auto:4:zero{stage}:{more}" for place in ("1x2", "2x2") for more in extras]
    run_script("parallel_updates.py", tmp_path / "untied", *cases)
    tied = [f"{place}:auto:4:zero{stage}" for place in ("1x2", "1x3", "2x2", "3x1")]
    run_script("parallel_updates.py", tmp_path / "tied", "tied", *tied, f"2x2:auto:4:zero{stage}:clip:steps")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchrun_trains_with_zero_on_two_nodes(tmp_path: Path, stage: int) -> None:
    """The update's own program; the next one on one node less, from the same state."""
    work = bench(tmp_path)
    work.prepare()
    work.update("alone")
    work.nested["trainer"] |= {"backend": "deepspeed", "zero_stage": stage}
    second = str(tmp_path / "second.result")
    for process, said in work.torchrun(work.update_spec("v1"), work.update_spec("v1", result=second)):
        assert process.returncode == 0, said
    assert largest_difference(work.weights("alone"), work.weights("v1")) < 1e-5
    result = json.loads((tmp_path / "v1.result").read_text())
    assert result["distributed"] == f"DeepSpeed ZeRO-{stage} on 2 processes (float32)"
    work.nested["algorithm"]["max_logprob_gap"] = 100.0
    ((process, said),) = work.torchrun(work.update_spec("v2", version=2, before="v1"))
    assert process.returncode == 0, said
    work.nested["trainer"] |= {"backend": "torch", "zero_stage": 3}
    work.update("torch", version=2, before="v1")
    assert largest_difference(work.weights("torch"), work.weights("v2")) < 1e-5


# --- killed at each stage -------------------------------------------------------------------------------------------------------


# See killed_updates.STAGES, which loads torch. What only the first process ever does comes last.
EITHER = ["batch", "loaded", "forward", "backward", "reduce", "step", "stepped", "gather", "copy", "part"]
EITHER += ["result"]
FIRST = ["commit", "committed"]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", ["2x1:none:4", "2x1:all:4:bf16", "2x1:auto:4:zero3"])
def test_a_process_under_torchrun_is_killed_at_each_stage(tmp_path: Path, case: str) -> None:
    stages = [f"{stage}:{rank}" for stage, rank in zip(EITHER, cycle((1, 0)), strict=False)]
    run_script("killed_updates.py", tmp_path, "torchrun", case, *stages, *(f"{stage}:0" for stage in FIRST))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "case",
    ["2x1:none:4", "2x1:all:4", "2x1:all:4:bf16", "1x2:node:4", "2x1:all:4:lora"]
    + [f"2x1:auto:4:zero{stage}" for stage in (1, 2, 3)],
)
def test_each_process_is_killed_at_each_stage(tmp_path: Path, case: str) -> None:
    stages = [f"{stage}:{rank}" for stage in EITHER for rank in (0, 1)]
    run_script("killed_updates.py", tmp_path, "forked", case, *stages, *(f"{stage}:0" for stage in FIRST))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", ["2x1:all:4:critic", "2x1:none:4:bf16:critic"])
def test_a_process_is_killed_while_the_critic_learns(tmp_path: Path, case: str) -> None:
    stages = [f"{stage}:{rank}" for stage in ("value", "part", "stepped") for rank in (0, 1)]
    run_script("killed_updates.py", tmp_path, "forked", case, *stages)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_each_of_four_processes_of_two_nodes_is_killed(tmp_path: Path) -> None:
    stages = [f"{stage}:{rank}" for stage in ("backward", "step", "gather", "part") for rank in range(4)]
    run_script("killed_updates.py", tmp_path, "forked", "2x2:node:4", *stages)
