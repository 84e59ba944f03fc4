"""Trainer states that either backend writes and reads, on any processes, and in any of DeepSpeed's stages; to the last bit.

`python zero_checkpoints.py FOLDER CASE...`: the first case writes (parallel_updates.py says what a case is), and goes on in a second
update; it then does the same from what was written. Each other case reads it, and must find the same weights and moments.
`update` among the cases: before that, the update of the first case must be that of one process alone. `tied`: of a model whose output
head is its embedding, and sharded over four processes the last has no row of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import parallel_updates
import torch
from checkpoint_ranks import in_ranks
from parallel_updates import Case, import_before_forking, make_batch, step, whole
from transformers import AutoModelForCausalLM

from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.checkpoint_write import sizes_on_disk
from fsbarrier.training.processes import Processes, gather_json
from fsbarrier.training.trainer import Trainer


def begin(case: Case, folder: Path, before: Path | None) -> Trainer:
    chosen = case.settings(folder)
    return Trainer.load(
        Processes(chosen.trainer),
        chosen,
        model_folder=(before or folder) / "model",
        state_folder=before / "trainer" if before else None,
        policy_version=1 if before else 0,
    )


def update(trainer: Trainer, case: Case, folder: Path) -> None:
    step(trainer, TrainingBatch.load(folder / "batch"), case.settings(folder), folder)


def held(trainer: Trainer) -> dict[str, Any]:
    """Every float32 weight and moment, whole."""
    state = trainer.backend.state(1, without_weights=False)
    return {name: whole(one) for name, one in state.tensors.items()} | {
        name: torch.tensor(value) for name, value in state.scalars.items()
    }


def in_place(case: Case, folder: Path, act: Any, *, may_fail: bool = False) -> list[int]:
    """Run `act(rank)` in the case's processes; how they ended."""

    def in_rank(rank: int) -> None:
        node, local = divmod(rank, case.per_node)
        place = {
            "RANK": rank,
            "WORLD_SIZE": case.nodes * case.per_node,
            "LOCAL_RANK": local,
            "GROUP_RANK": node,
        }
        os.environ.update({k: str(v) for k, v in {**place, "LOCAL_WORLD_SIZE": case.per_node}.items()})
        act(rank)

    ended = in_ranks(case.nodes * case.per_node, folder / "store", in_rank)
    assert may_fail or not any(ended), f"{case.text}: {ended}"
    return ended


def same(found: dict[str, Any], wanted: dict[str, Any], text: str) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(found[name].float(), one.float()), f"{text}: {name} differs"


def write(case: Case, folder: Path) -> None:
    """One update, saved as v1, and a second one."""

    def act(rank: int) -> None:
        trainer = begin(case, folder, None)
        update(trainer, case, folder)
        once = held(trainer)
        sizes = sizes_on_disk(trainer.backend.weights(), trainer.processes.serving_dtype)
        # Processes that list other weights wait for each other in vain.
        assert all(list(other.items()) == list(sizes.items()) for other in gather_json(sizes)), sizes
        trainer.save(folder / "v1", model_folder=folder / "model", policy_version=1)
        update(trainer, case, folder)
        twice = held(trainer)
        again = begin(case, folder, folder / "v1")
        update(again, case, folder)
        same(held(again), twice, f"{case.text} from its own state")
        if rank == 0:
            torch.save(once, folder / "once.pt")

    in_place(case, folder, act)


def read(case: Case, folder: Path) -> None:
    wanted = torch.load(folder / "once.pt", weights_only=True)

    def act(rank: int) -> None:
        trainer = begin(case, folder, folder / "v1")
        assert trainer.optimizer_steps == 1
        same(held(trainer), wanted, case.text)
        # And what is computed with are these weights.
        for name, one in trainer.backend.weights().items():
            # A sharded model of PyTorch's keeps them in float32 and computes with a rounded copy; the others keep the rounded ones.
            rounded = wanted[f"weight/{name}"].to(trainer.processes.dtype).float()
            assert any(
                torch.equal(whole(one), kept) for kept in (rounded, wanted[f"weight/{name}"].float())
            ), name

    in_place(case, folder, act)


def check_served(case: Case, folder: Path) -> None:
    wanted = torch.load(folder / "once.pt", weights_only=True)
    dtype = getattr(torch, case.dtype)
    served = AutoModelForCausalLM.from_pretrained(folder / "v1" / "model", dtype=dtype)
    for name, one in served.named_parameters():
        assert torch.equal(one, wanted[f"weight/{name}"].to(dtype)), name


def main(folder: Path, texts: list[str]) -> None:
    import_before_forking([text for text in texts if text != "update"])
    if "tied" in texts:
        make_batch(folder, tied=True, vocabulary=9)
    else:
        make_batch(folder, tied=False)
    first, *others = (Case(text) for text in texts if text not in ("tied", "update"))
    if "update" in texts:
        parallel_updates.main(folder / "update", [first.text])
    write(first, folder)
    check_served(first, folder)
    for case in others:
        read(case, folder)
        print(f"{first.text} -> {case.text}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
