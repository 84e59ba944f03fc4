"""DeepSpeed as the update's backend: its configuration beside our settings, the same update, states that any other can go on from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forks import run_script
from trainer_bench import bench, largest_difference

from fsbarrier.errors import UsageError
from fsbarrier.settings import deepspeed_config
from fsbarrier.settings.sections import Settings
from fsbarrier.store import reading

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
    assert filled["gradient_clipping"] == 1.0 and filled["bf16"] == {"enabled": True}
    assert filled["communication_data_type"] == "fp32" == filled["data_types"]["grad_accum_dtype"]
    assert filled["steps_per_print"] == 2000 and not {"fp16", "optimizer", "train_batch_size"} & set(filled)
    none = {"device": "none"}
    zero = {"stage": 2, "offload_optimizer": none, "offload_param": none, "overlap_comm": True}
    # accelerate fills in what depends on the model's width; elsewhere DeepSpeed's default counts.
    sizes = {"reduce_bucket_size": "auto", "allgather_bucket_size": 5e8}
    assert filled["zero_optimization"] == {**zero, **sizes}
    assert USUAL["optimizer"]["params"]["lr"] == "auto"
    offloaded = deepspeed_config.filled({}, settings(offload="all"), "float32")["zero_optimization"]
    cpu = {"device": "cpu"}
    assert offloaded == {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    assert "bf16" not in deepspeed_config.filled({}, settings(), "float32")


ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("given", "trainer", "said"),
    [
        ({"gradient_clipping": 0.5}, {}, "gradient_clipping=0.5: the setting optimizer.grad_clip decides"),
        ({"optimizer": {"params": {"lr": 1e-5}}}, {}, r"params.lr=1e-05: the setting optimizer.\* decides"),
        ({"optimizer": {"type": "Adagrad"}}, {}, r"optimizer.type=Adagrad: the setting optimizer.\* decides"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "scheduler.type=WarmupLR: the setting optimizer.schedule"),
        ({"train_batch_size": 128}, {}, "train_batch_size=128: the setting trainer.minibatch"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled=True: the setting trainer.dtype"),
        ({ZERO: {"stage": 0}}, {}, "stage=0: must be 1, 2 or 3"),
        ({ZERO: {"stage": "3"}}, {}, "stage=3: must be 1, 2 or 3"),
        ({ZERO: {"stage": 2}}, {"shard": "all"}, "stage=2, but trainer.shard=all"),
        ({ZERO: {"stage": 2}}, {"offload": "all"}, "stage=2, but trainer.offload=all"),
        ({ZERO: {"offload_param": {"device": "nvme"}}}, {}, "device=nvme: the setting trainer.offload"),
        ({ZERO: True}, {}, "zero_optimization=True: not supported"),
        ({ZERO: {"mics_shard_size": 8}}, {}, "mics_shard_size=8: not supported"),
        ({"sequence_parallel_size": 2}, {}, "sequence_parallel_size=2: not supported"),
        ({"compression_training": {"x": 1}, "gradient_clipping": 2}, {}, "x=1: not supported.*clipping=2"),
    ],
)
def test_what_settings_decide_and_what_is_not_supported_is_refused_by_name(
    given: dict[str, Any], trainer: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=f"trainer.deepspeed=ds.json: .*{said}"):
        deepspeed_config.filled(given, settings(**trainer), "float32")


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
