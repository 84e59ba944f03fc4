"""DeepSpeed as the update's backend: its configuration beside our settings, the same update, states that any other can go on from."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import bench, largest_difference, run_script

from fsbarrier import reading
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.settings import deepspeed_config
from fsbarrier.settings.sections import Settings

# As people have them, for other trainers: whatever the trainer knows itself is left to it.
USUAL: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale_window": 1000},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none"},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": 5e8,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def settings(**trainer: Any) -> Settings:
    chosen = replace(Settings().trainer, backend="deepspeed", deepspeed="ds.json", **trainer)
    return replace(Settings(), trainer=chosen)


def test_what_a_file_leaves_open_is_filled_in() -> None:
    filled = deepspeed_config.filled(USUAL, settings(), "bfloat16")
    assert filled["gradient_clipping"] == 1.0 and filled["bf16"]["enabled"] is True
    assert filled["communication_data_type"] == "fp32" == filled["data_types"]["grad_accum_dtype"]
    # What nothing here is about stays as it was, or is DeepSpeed's to choose.
    assert filled["steps_per_print"] == 2000 and filled["fp16"] == {"loss_scale_window": 1000}
    zero = {"stage": 2, "offload_optimizer": {"device": "none"}, "overlap_comm": True}
    assert filled["zero_optimization"] == {**zero, "allgather_bucket_size": 5e8}
    assert "optimizer" not in filled and USUAL["optimizer"]["params"]["lr"] == "auto"
    offloaded = deepspeed_config.filled({}, settings(offload="all"), "float32")["zero_optimization"]
    cpu = {"device": "cpu"}
    assert offloaded == {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    assert "bf16" not in deepspeed_config.filled({}, settings(), "float32")
    # What says the same as the settings is no contradiction.
    same = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "betas": [0.9, 0.95]}},
        "bf16": {"enabled": False},
    }
    deepspeed_config.filled({**same, "train_batch_size": 256, "gradient_clipping": 1}, settings(), "float32")


ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("given", "trainer", "said"),
    [
        ({"gradient_clipping": 0.5}, {}, "gradient_clipping=0.5, but optimizer.grad_clip=1"),
        ({"optimizer": {"params": {"lr": 1e-5}}}, {}, "optimizer.params.lr=1e-05, but optimizer.lr=1e-06"),
        ({"optimizer": {"params": {"betas": [0.9, 0.999]}}}, {}, r"betas=\[0.9, 0.999\], but optimizer.betas=\[0.9, 0.95\]"),
        ({"optimizer": {"type": "Adagrad"}}, {}, "optimizer.type=Adagrad, but fsbarrier supports only AdamW"),
        ({"optimizer": {"params": {"weight_decay": 0.1}}}, {}, "weight_decay=0.1, but optimizer.weight_decay=0"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "scheduler="),
        ({"train_batch_size": 128}, {}, "train_batch_size=128, but trainer.minibatch=256"),
        ({"train_micro_batch_size_per_gpu": 4}, {}, "per_gpu=4, but trainer.micro_batch=none"),
        ({"gradient_accumulation_steps": 8}, {}, "gradient_accumulation_steps=8, but fsbarrier derives it"),
        ({"bf16": {"enabled": True}}, {}, "bf16.enabled=true, but trainer.dtype=auto, which is float32 here"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled=true, but fsbarrier supports only false"),
        ({"communication_data_type": "fp16"}, {}, "communication_data_type=fp16, but fsbarrier accumulates gradients in float32"),
        ({ZERO: {"stage": 0}}, {}, "stage=0: must be 1, 2 or 3"),
        ({ZERO: {"stage": "3"}}, {}, "stage=3: must be 1, 2 or 3"),
        ({ZERO: {"stage": 2}}, {"shard": "all"}, "stage=2, but trainer.shard=all"),
        ({ZERO: {"stage": 2}}, {"offload": "all"}, "stage=2, but trainer.offload=all"),
        ({ZERO: {"offload_optimizer": {"device": "cpu"}}}, {}, "device=cpu, but trainer.offload=none"),
        ({ZERO: {"offload_param": {"device": "nvme"}}}, {"offload": "all"}, "device=nvme, but trainer.offload=all"),
        ({ZERO: True}, {}, "zero_optimization=true: must be an object"),
        ({ZERO: {"mics_shard_size": 8}}, {}, "mics_shard_size=8, but fsbarrier supports only -1"),
    ],
)  # fmt: skip
def test_what_contradicts_the_settings_is_refused_with_both_values(
    given: dict[str, Any], trainer: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=f"trainer.deepspeed=ds.json: .*{said}"):
        deepspeed_config.filled(given, settings(**trainer), "float32")


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        deepspeed_config.filled({"gradient_clipping": 2, "train_batch_size": 1}, settings(), "float32")
    assert "gradient_clipping=2" in str(refused.value) and "train_batch_size=1" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"{", "is not JSON: "),
        (b"[" * 4000, "is not JSON: "),
        (b"[1]", "is not a JSON object"),
        (b" " * 4097, "cannot be read: it has 4097 bytes, and 4096 are allowed"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, said: str
) -> None:
    monkeypatch.setattr(reading, "JSON_BYTES", 4096)
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        deepspeed_config.read(str(file))
    assert str(refused.value).startswith(f"trainer.deepspeed={file}: {said}")


def test_a_configuration_is_read_through_a_link_and_never_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(json.dumps(USUAL))
    (tmp_path / "ds.json").symlink_to("real.json")
    assert deepspeed_config.read(str(tmp_path / "ds.json")) == USUAL
    # To open it would wait for somebody to write.
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be read: it is a FIFO, not a plain file"):
        deepspeed_config.read(str(tmp_path / "pipe"))


@pytest.mark.torch
def test_parts_that_are_cut_anywhere_are_read_by_any_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors of up to three dimensions, written in rows or in runs of numbers, in blocks that end elsewhere again."""
    import torch

    from fsbarrier.training import safetensors_file
    from fsbarrier.training.slices import Box, FlatPart, local_part
    from fsbarrier.training.stored_tensors import StoredPart, StoredTensors

    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 40)
    draw = random.Random(0)
    for number in range(40):
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 3)))
        tensor = torch.randn(shape)
        in_rows, parts = draw.random() < 0.5, []
        pieces = tensor if in_rows else tensor.flatten()
        ends = sorted({0, len(pieces), *(draw.randint(0, len(pieces)) for _ in range(2))})
        for start, end in pairwise(ends):
            file, data = f"{number}-{start}", pieces[start:end]
            _, checks = safetensors_file.write(tmp_path / file, {"w": data})
            begin = (start,) + (0,) * (data.dim() - 1)
            parts.append(StoredPart(file, Box(begin, tuple(data.shape)), tuple(checks["w"])))
        start = draw.randint(0, tensor.numel())
        part = FlatPart(shape, start, torch.zeros(draw.randint(0, tensor.numel() - start)))
        with StoredTensors(tmp_path, {"w": shape}, {"w": parts}) as stored:
            assert torch.equal(stored.read("w", torch.float32), tensor)
            stored.fill("w", part)
            assert torch.equal(part.data, tensor.flatten()[start : start + len(part.data)])
            assert local_part(part, 0, 1).box == Box((start,), (len(part.data),))
        if parts[1:]:
            with (
                pytest.raises(ProgramFailed, match="values of w are missing"),
                StoredTensors(tmp_path, {"w": shape}, {"w": parts[1:]}) as stored,
            ):
                stored.read("w", torch.float32)


@pytest.mark.torch
def test_zero_makes_the_same_update(tmp_path: Path) -> None:
    run_script("parallel_updates.py", tmp_path, "1x2:auto:3:zero2:clip:steps", "2x1:auto:5:zero3:clip:steps")


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
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({ZERO: {"stage": stage}}))
    work.nested["trainer"] |= {"backend": "deepspeed", "deepspeed": str(file)}
    second = str(tmp_path / "second.result")
    for process, said in work.torchrun(work.update_spec("v1"), work.update_spec("v1", result=second)):
        assert process.returncode == 0, said
    assert largest_difference(work.weights("alone"), work.weights("v1")) < 1e-5
    result = json.loads((tmp_path / "v1.result").read_text())
    assert result["distributed"] == f"DeepSpeed ZeRO-{stage} on 2 processes (float32)"
    work.nested["algorithm"]["max_logprob_gap"] = 100.0
    ((process, said),) = work.torchrun(work.update_spec("v2", version=2, before="v1"))
    assert process.returncode == 0, said
    work.nested["trainer"] |= {"backend": "torch", "deepspeed": None}
    work.update("torch", version=2, before="v1")
    assert largest_difference(work.weights("torch"), work.weights("v2")) < 1e-5
