"""DeepSpeed as the update's backend: the same update, states that any other can go on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import run_script
from trainer_bench import bench, largest_difference


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
