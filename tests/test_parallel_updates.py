"""The update is the same on any processes, sharded in any way, and what cannot be in effect is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks import run_script

from fsbarrier.errors import UsageError
from fsbarrier.planning.memory import UpdateLoad
from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings.sections import TrainerSettings

PLACES = ("1x1", "1x2", "2x1", "1x3", "3x1", "1x4", "2x2", "4x1")
MIB = 1 << 20

pytestmark = pytest.mark.torch


def test_the_update_is_the_same_replicated_and_sharded(tmp_path: Path) -> None:
    run_script(
        "parallel_updates.py",
        tmp_path,
        *(f"{case}:clip:steps" for case in ("2x1:none:3", "2x2:node:5")),
        "3x1:all:1:steps:critic",
    )


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


def test_a_node_shares_a_copy_or_all_do() -> None:
    assert layout_for((2, 2), shard="node").shards == 2
    assert layout_for((2, 2), shard="all").shards == 4
    assert layout_for((2, 2), shard="none").shards == 1
    assert layout_for((4,), shard="node").shards == 4
    # The last node left is still sharded over all of its processes, even if that is one.
    assert layout_for((1,), shard="all").shards == 1


def test_what_cannot_be_sharded_within_a_node_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"trainer.shard=node: .*different numbers of processes \(2, 1\)"):
        layout_for((2, 1), shard="node")


def test_auto_shards_as_little_as_fits() -> None:
    """2**28 parameters take 4 GiB of state beside what every process needs."""
    assert layout_for((2, 2), memory_mib=8000).shards == 1
    assert layout_for((2, 2), memory_mib=5000).shards == 2
    assert layout_for((2, 2), memory_mib=4000).shards == 4
    assert layout_for((2, 1), memory_mib=5000).shards == 3
