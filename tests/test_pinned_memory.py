"""A trainer that makes room for an engine between two updates, and is then as it was. Here the accelerator is the CPU, whose memory it
leaves in the same way; what a driver says of free memory is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_bench import Bench, bench, largest_difference, rollouts

from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import Settings
from fsbarrier.supervision.kept_program import JOBS

pytestmark = pytest.mark.torch
TOTAL = 1000
# The engine's share of it is 850.
ROOM, TOO_LITTLE = 850, 849


class Driver:
    """What the driver says of free memory, one answer after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
        from fsbarrier.training.processes import Processes

        self.answers = list(free)
        monkeypatch.setattr(Processes, "accelerator_memory", lambda _: (self.answers.pop(0), TOTAL))


def trained(work: Bench) -> Any:
    """A trainer with moments."""
    from fsbarrier.training.batch import TrainingBatch
    from fsbarrier.training.optimizer_step import train

    trainer = work.trainer()
    train(trainer, TrainingBatch.load(work.folder / "batch"), work.settings, work.folder / "model")
    return trainer


def state(trainer: Any) -> dict[str, Any]:
    """Every number that an update depends on, as this process holds it."""
    import torch

    def own(tensor: Any) -> Any:
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()

    backend = trainer.backend
    found = {name: own(one) for name, one in backend.model.named_parameters()}
    found |= {name: own(one) for name, one in backend.model.named_buffers()}
    for name, one in backend.trained.items():
        for key, value in backend.optimizer.state[one].items():
            found[f"{name}.{key}"] = own(torch.as_tensor(value))
    return found


def bytes_left(trainer: Any) -> int:
    backend = trainer.backend
    moments = [value for values in backend.optimizer.state.values() for value in values.values()]
    tensors = [*backend.model.parameters(), *backend.model.buffers(), *moments]
    plain = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return sum(one.untyped_storage().nbytes() for one in plain)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__dtype": "bfloat16"},
        {"trainer__dtype": "bfloat16", "lora__rank": 2},
        {"tied": True},
    ],
    ids=lambda changes: "-".join(changes) or "whole",
)
def test_the_trainers_memory_leaves_the_accelerator_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    import torch

    work = bench(tmp_path, **changes)
    work.nested["trainer"]["timeout_s"] = 60
    work.prepare()
    trainer = trained(work)
    before, places = state(trainer), [id(one) for one in trainer.backend.model.parameters()]
    assert any(name.endswith(".exp_avg") for name in before)
    Driver(monkeypatch, TOO_LITTLE, ROOM)
    assert trainer.leave_room(work.settings)
    assert bytes_left(trainer) == 0
    trainer.come_back()
    after = state(trainer)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert [id(one) for one in trainer.backend.model.parameters()] == places
    trainer.come_back()
    torch.distributed.destroy_process_group()


def test_the_next_update_is_that_of_a_trainer_that_never_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    from fsbarrier.supervision.worker_contract import ProgressWriter
    from fsbarrier.training import safetensors_file
    from fsbarrier.workers.update import Updates, leave

    # What lies on an accelerator is copied before it is written; PyTorch never frees what NumPy once saw.
    bytes_of = safetensors_file.bytes_of
    monkeypatch.setattr(safetensors_file, "bytes_of", lambda tensor: bytes_of(tensor.clone()))

    def two_updates(prefix: str) -> bool:
        updates, progress = Updates(), ProgressWriter(None)
        updates.main(work.update_spec(f"{prefix}1", policy="start"), work.settings, progress)
        (tmp_path / "merged").unlink()
        rollouts(tmp_path / "merged", AutoModelForCausalLM.from_pretrained(tmp_path / f"{prefix}1" / "model"))
        work.prepare()
        stayed = updates.stay()
        second = work.update_spec(f"{prefix}2", version=2, before=f"{prefix}1")
        result = updates.main(second, work.settings, progress)
        assert result is not None and result["went_on"] is True
        (tmp_path / "merged").unlink()
        rollouts(tmp_path / "merged", AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
        work.prepare()
        return stayed

    work = bench(tmp_path, trainer__dtype="bfloat16")
    work.nested["trainer"]["timeout_s"] = 60
    work.nested["algorithm"]["max_logprob_gap"] = 1.0
    work.prepare()
    # Without a daemon that gives it other jobs nobody asks the driver.
    driver = Driver(monkeypatch)
    assert two_updates("here")
    monkeypatch.setenv(JOBS, "a socket")
    driver.answers = [TOO_LITTLE, ROOM] * 2
    assert two_updates("moved")
    assert driver.answers == []
    assert largest_difference(work.weights("here2"), work.weights("moved2")) == 0
    assert largest_difference(work.weights("here1"), work.weights("here2")) > 0
    driver.answers = [TOO_LITTLE, TOO_LITTLE] * 2
    assert not two_updates("none")
    leave()


def test_what_is_not_in_the_way_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = bench(tmp_path)
    work.prepare()
    trainer = trained(work)
    held = bytes_left(trainer)
    Driver(monkeypatch, ROOM)
    assert trainer.leave_room(work.settings) and bytes_left(trainer) == held
    Driver(monkeypatch, TOO_LITTLE, TOO_LITTLE)
    assert not trainer.leave_room(work.settings)


def test_a_host_without_room_costs_the_process_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from fsbarrier.training import pinned_memory

    copy_of, made = pinned_memory._copy_of, []

    def full(storage: Any) -> Any:
        if len(made) == 3:
            raise RuntimeError("CUDA error: out of memory")
        made.append(copy_of(storage))
        return made[-1]

    work = bench(tmp_path)
    work.prepare()
    trainer = trained(work)
    before = state(trainer)
    monkeypatch.setattr(pinned_memory, "_copy_of", full)
    Driver(monkeypatch, TOO_LITTLE)
    assert not trainer.leave_room(work.settings)
    after = state(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("choices", "needed"),
    [
        ({}, 850),
        ({"engine.gpu_memory_utilization": 0.5}, 500),
        ({"engine.release": "sleep"}, 850),
        ({"engine.release": "keep"}, 0),
        ({"engine.url": "http://127.0.0.1:8000"}, 0),
        ({"rl_phase": "update"}, 0),
    ],
    ids=str,
)
def test_what_an_engine_takes_when_it_wakes(choices: dict[str, object], needed: int) -> None:
    from fsbarrier.training.pinned_memory import bytes_for_engine

    settings: Settings = resolve([], choices, cross_checks=False)
    assert bytes_for_engine(settings, TOTAL) == needed
