"""What an update begins with: the policy that made the rollouts, or, where the state that belongs to it is gone, an earlier one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import Settings
from fsbarrier.training.node_state import NodeState
from fsbarrier.training.processes import Processes
from fsbarrier.training.trainer import Trainer
from fsbarrier.training.trainer_state import StateGone


@dataclass(frozen=True, slots=True)
class Beginning:
    """`model`: the folder that the weights are from. `state_in`: see Manifest. `went_back`: why it is an earlier policy, or ""."""

    trainer: Trainer
    model: Path
    state_in: str | None
    went_back: str = ""


def begin(
    processes: Processes,
    settings: Settings,
    node: NodeState,
    *,
    model: Path,
    trainer_state: Path | None,
    policy_version: int,
    first_model: Path,
) -> Beginning:
    """Load the policy in `model` with its trainer state, from the nodes or from the shared directory.

    Without any state to go on from, what was learned since the last one cannot be trained further as it was: the policy goes back to
    the version that has one. Raises what Trainer.load raises.
    """
    if trainer_state is None:
        trainer = Trainer.load(
            processes, settings, model_folder=model, state_folders=[], policy_version=policy_version
        )
        return Beginning(trainer, model, None)
    version = trainer_state.parent
    folders = [node.of_version(version.name) / "trainer", trainer_state]
    try:
        trainer = Trainer.load(
            processes,
            settings,
            model_folder=first_model if settings.lora.rank else model,
            state_folders=folders,
            policy_version=policy_version,
        )
        state_in = checkpoints.read_manifest(version).state_in
        return Beginning(trainer, model, version.name if state_in == "" else state_in)
    except StateGone:
        state_in = checkpoints.read_manifest(version).state_in
    origin, number, folders = first_model, 0, []
    if state_in is not None:
        before = version.parent / state_in
        origin, number, folders = (
            before / "model",
            checkpoints.read_manifest(before).policy_version,
            [before / "trainer"],
        )
    trainer = Trainer.load(
        processes,
        settings,
        model_folder=first_model if settings.lora.rank else origin,
        state_folders=folders,
        policy_version=number,
    )
    why = (
        f"the trainer state of policy version {policy_version} is gone with a node that kept a part of it; this version is version "
        f"{number} again, the newest whose state is in the shared directory"
    )
    return Beginning(trainer, origin, state_in, why)
