"""AdamW with moments of eight bits: the library itself, updates that go on from each other, shards, and what it refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import Bench, first_weights, largest_difference, rollouts, settings, tiny_model

from fsbarrier.errors import UsageError
from fsbarrier.start.preflight import check_optimizer


def test_a_package_that_is_missing_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"optimizer.kind=adamw_8bit: needs the Python package torchao"):
        check_optimizer("adamw_8bit")
    check_optimizer("adamw")


@pytest.fixture
def work(tmp_path: Path) -> Bench:
    """Matrices of 8192 and 4096 numbers, in two halves of which some still have moments of eight bits."""
    rollouts(tmp_path / "merged", tiny_model(tmp_path / "model", hidden_size=64))
    known = {"algorithm__max_logprob_gap": 1e9, "algorithm__old_logprobs": "engine"}
    made = Bench(tmp_path, settings(optimizer__kind="adamw_8bit", **known))
    made.prepare()
    return made


def three(work: Bench, kind: str, name: str) -> dict[str, Any]:
    """The weights after three updates, each in a trainer that is loaded anew."""
    work.nested["optimizer"]["kind"] = kind
    for version in (1, 2, 3):
        work.update(f"{name}{version}", version=version, before=f"{name}{version - 1}" if version > 1 else "")
    return work.weights(f"{name}3")


def moments_of(trainer: Any) -> dict[str, int]:
    """How many bytes each first moment takes for a number of its parameter."""
    states = trainer.backend.optimizer.state
    return {
        name: states[one]["exp_avg"].codes.element_size() if hasattr(states[one]["exp_avg"], "codes") else 4
        for name, one in trainer.backend.trained.items()
    }


@pytest.mark.torch
def test_adamw_8bit_trains_as_adamw_does_but_for_its_rounding(work: Bench) -> None:
    exact, rounded = three(work, "adamw", "exact"), three(work, "adamw_8bit", "rounded")
    moved = largest_difference(first_weights(work.folder), exact)
    assert 0 < largest_difference(exact, rounded) < 0.2 * moved


@pytest.mark.torch
def test_whoever_goes_on_from_a_state_does_what_the_one_that_saved_it_does(work: Bench) -> None:
    """Both kinds read either's state; the moments that are read are of eight bits, and the same as those in memory."""
    from fsbarrier.training.processes import Processes
    from fsbarrier.training.trainer import Trainer
    from fsbarrier.training.trainer_state import restore

    work.update("v1")

    def loaded(before: str, version: int) -> Any:
        place: dict[str, Any] = {"model_folder": work.folder / before / "model", "policy_version": version}
        state = [work.folder / before / "trainer"]
        return Trainer.load(Processes(work.settings.trainer), work.settings, state_folders=state, **place)

    first = loaded("v1", 1)
    sizes = moments_of(first)
    # Another process could not read the first folder, so that all go on from the next one.
    restore(work.folder / "v1" / "trainer", first.backend.trained, first.backend.optimizer, 1)
    assert moments_of(first) == sizes
    assert sizes["model.layers.0.mlp.up_proj.weight"] == 1 and sizes["model.norm.weight"] == 4
    first.save(work.folder / "again", model_folder=work.folder / "v1" / "model", policy_version=2)
    second = loaded("again", 2)
    for name, parameter in first.backend.trained.items():
        other = second.backend.trained[name]
        for key in ("exp_avg", "exp_avg_sq"):
            one, two = (
                first.backend.optimizer.state[parameter][key],
                second.backend.optimizer.state[other][key],
            )
            assert (
                bool((one.dequantize() == two.dequantize()).all())
                if hasattr(one, "codes")
                else bool((one == two).all())
            )
    work.nested["optimizer"]["kind"] = "adamw"
    assert set(moments_of(loaded("again", 2)).values()) == {4}


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shards_make_the_same_update_and_go_on_alone(work: Bench) -> None:
    from fsbarrier.training.trainer_state import StateLayout

    work.update("alone")
    work.nested["trainer"] |= {"shard": "all", "processes_per_node": 2}
    ((process, said),) = work.torchrun(work.update_spec("shards"), processes=2)
    assert process.returncode == 0, said
    moved = largest_difference(first_weights(work.folder), work.weights("alone"))
    # Other numbers share a scale.
    assert largest_difference(work.weights("alone"), work.weights("shards")) < 0.2 * moved
    parts = StateLayout.read(work.folder / "shards" / "trainer").parts[
        "exp_avg/model.layers.0.mlp.up_proj.weight"
    ]
    assert len(parts) == 2
    work.nested["trainer"] |= {"shard": "none", "processes_per_node": None}
    work.update("next", version=2, before="shards")
