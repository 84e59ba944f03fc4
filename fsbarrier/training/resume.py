"""The starting point of an update: the policy that sampled the rollouts, or an earlier one if its trainer state was not saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import Settings
from fsbarrier.training.node_copy import NodeCopy
from fsbarrier.training.processes import Processes, gather_json
from fsbarrier.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Beginning:
    """`model`: the folder of the weights. `state_in`: the newest version with a trainer state, if any. `went_back`: the reason for an
    earlier policy, or ""."""

    trainer: Trainer
    model: Path
    state_in: str | None
    went_back: str = ""


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
            (one.trainer, one.optimizer, one.lora, one.critic) for one in (self.settings, settings)
        )
        return self.policy == policy and before == now


def go_on(
    held: KeptTrainer | None, policy: str, settings: Settings, model: Path, trainer_state: Path | None
) -> Beginning | None:
    """Reuse the kept trainer, if every process holds exactly the policy to train; every process must call this."""
    agreed = all(gather_json(held is not None and held.serves(policy, settings)))
    if not agreed or held is None or trainer_state is None:
        return None
    return Beginning(held.trainer, model, checkpoints.newest_state(trainer_state.parent))


def begin(
    processes: Processes,
    settings: Settings,
    copy: NodeCopy | None,
    *,
    model: Path,
    trainer_state: Path | None,
    policy: str,
    policy_version: int,
    first_model: Path,
) -> Beginning:
    """Load the policy in `model` with its trainer state from the shared directory.

    If this version was saved without one (`checkpoint.trainer_every`), falls back to the newest version that has one. Raises the errors
    of Trainer.load.
    """

    def load(weights: Path, state: Path | None, number: int) -> Trainer:
        # The adapters are added to the initial model; the trainer state contains them.
        folder = first_model if settings.lora.rank else weights
        return Trainer.load(
            processes, settings, model_folder=folder, state_folder=state, policy_version=number
        )

    if trainer_state is None:
        return Beginning(load(model, None, policy_version), model, None)
    version = trainer_state.parent
    checkpoints.check_identity(version, policy)
    state_in = checkpoints.newest_state(version)
    if state_in == version.name:
        here = model if copy is None else copy.place.nearest(model)
        return Beginning(load(here, trainer_state, policy_version), model, state_in)
    origin, number = first_model, 0
    state: Path | None = None
    if state_in is not None:
        before = version.parent / state_in
        origin, state = before / "model", before / "trainer"
        number = checkpoints.read_manifest(before).policy_version
    why = (
        f"policy version {policy_version} was saved without its trainer state (checkpoint.trainer_every), and the processes that held it "
        f"have ended; falling back to version {number}, the newest one with a trainer state"
    )
    return Beginning(load(origin, state, number), origin, state_in, why)
