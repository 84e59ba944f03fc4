"""Finds the starting point of an update: the policy that sampled the rollouts, or an earlier one if its trainer state was not saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import UpdateSpec
from fsbarrier.training.checkpoint_write import NodeCopy
from fsbarrier.training.processes import Processes, gather_json
from fsbarrier.training.trainer import Trainer
from fsbarrier.wording import counted


@dataclass(frozen=True, slots=True)
class Beginning:
    """`model`: the folder of the weights. `state_in`: the newest version with a trainer state, if any; `trained_since`: the batches that
    led from it to the policy to train. `again`: those of them to train again first, because the processes that had trained them have ended.
    `went_back`: an earlier policy is trained. `note`: a message for people, if processes were lost."""

    trainer: Trainer
    model: Path
    state_in: str | None
    trained_since: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    went_back: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class KeptTrainer:
    """A trainer kept in memory after an update, with the identity of its policy (`checkpoints.identity`) and the settings it was created
    with."""

    trainer: Trainer
    policy: str
    settings: Settings

    def serves(self, policy: str, settings: Settings) -> bool:
        """Whether it equals the trainer that would be loaded. Some settings (weight decay; DeepSpeed's maximum norm) are read only when a
        trainer is created, so a change requires a new one."""
        before, now = (
            (some_settings.trainer, some_settings.optimizer, some_settings.lora, some_settings.critic)
            for some_settings in (self.settings, settings)
        )
        return self.policy == policy and before == now


def reuse_kept(held: KeptTrainer | None, spec: UpdateSpec, settings: Settings) -> Beginning | None:
    """Reuse the kept trainer, if every process holds exactly the policy to train; every process must call this."""
    agreed = all(gather_json(held is not None and held.serves(spec.policy, settings)))
    if not agreed or held is None or spec.trainer_state is None:
        return None
    state_in, since = checkpoints.newest_state(spec.trainer_state.parent)
    return Beginning(held.trainer, spec.model, state_in, since)


def load_start(
    processes: Processes, settings: Settings, copy: NodeCopy | None, spec: UpdateSpec
) -> Beginning:
    """Load the policy to train with its trainer state from the shared directory.

    If this version was saved without one (`checkpoint.trainer_every`), begins with the newest version that has one. The batches that were
    trained since then are trained again, or where one of them is gone, training falls back to that version. Raises the errors of
    Trainer.load.
    """
    model, first, policy_version = spec.model, spec.first_model, spec.policy_version

    def load(weights: Path, state: Path | None, number: int) -> Trainer:
        # The adapters are added to the initial model; the trainer state contains them.
        folder = first if settings.lora.rank else weights
        return Trainer.load(
            processes, settings, model_folder=folder, state_folder=state, policy_version=number
        )

    if spec.trainer_state is None:
        return Beginning(load(model, None, policy_version), model, None)
    version = spec.trainer_state.parent
    checkpoints.check_identity(version, spec.policy)
    state_in, since = checkpoints.newest_state(version)
    if state_in == version.name:
        here = model if copy is None else copy.place.nearest(model)
        return Beginning(load(here, version / "trainer", policy_version), model, state_in)
    origin, state, number = first, None, 0
    if state_in is not None:
        before = version.parent / state_in
        origin, state = before / "model", before / "trainer"
        number = checkpoints.read_manifest(before).policy_version
    lost = (
        f"policy version {policy_version} was saved without its trainer state (checkpoint.trainer_every), and the processes that held it "
        "have ended; "
    )
    # This is the seed that the next version was made with, so a new critic gets the same first weights.
    torch.manual_seed(number + 1)
    trainer, batches = load(origin, state, number), spec.batch.parent
    # Nodes may see different directory listings, so all of them must have found the batches.
    if since and all(gather_json(all((batches / name).is_file() for name in since))):
        note = f"{lost}trained again from version {number} on: {counted(len(since), 'batch', 'batches')}"
        return Beginning(trainer, origin, state_in, again=since, note=note)
    note = f"{lost}falling back to version {number}, the newest one with a trainer state"
    return Beginning(trainer, origin, state_in, went_back=True, note=note)
