"""Finds the starting point of an update: the policy that sampled the rollouts, or an earlier one if its trainer state was not saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.checkpoints import Base
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import UpdateSpec
from fsbarrier.training import materialise, merge_adapters
from fsbarrier.training.checkpoint_write import NodeCopy
from fsbarrier.training.local_state import LocalState
from fsbarrier.training.processes import Processes, gather_json
from fsbarrier.training.trainer import Trainer
from fsbarrier.wording import counted


@dataclass(frozen=True, slots=True)
class Beginning:
    """`model`: the folder of the weights. `state_in`: the newest version with a trainer state, if any; `trained_since`: the batches that
    led from it to the policy to train. `again`: those of them to train again first, because the processes that had trained them have ended.
    `went_back`: an earlier policy is trained. `note`: a message for people, if processes were lost. `base`: with adapters,
    the first model, into which every node can merge them; None: no node can."""

    trainer: Trainer
    model: Path
    state_in: str | None
    trained_since: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    went_back: bool = False
    note: str = ""
    base: Base | None = None


@dataclass(frozen=True, slots=True)
class KeptTrainer:
    """A trainer kept in memory after an update, with the identity of its policy (`checkpoints.identity`) and the settings it was created
    with."""

    trainer: Trainer
    policy: str
    settings: Settings
    base: Base | None

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
    return Beginning(held.trainer, spec.model, state_in, since, base=held.base)


def load_start(
    processes: Processes, settings: Settings, copy: NodeCopy | None, spec: UpdateSpec
) -> Beginning:
    """Load the policy to train with its trainer state, and compare the first model with the one to which its adapters belong."""
    base = first_model_as_base(processes, copy, spec) if settings.lora.rank else None
    start = _load_start(processes, settings, copy, spec)
    adapters = start.trainer.adapters
    renamed = None if adapters is None else adapters.renamed(start.trainer.model.causal)
    return start if base is None or renamed is None else replace(start, base=replace(base, renamed=renamed))


def first_model_as_base(processes: Processes, copy: NodeCopy | None, spec: UpdateSpec) -> Base | None:
    """The run's first model, by the digest of its weights, which one process of each node reads, once where the node has a place for
    copies; None if adapters cannot be merged into its files. Every process must call this. Raises ProgramFailed if nodes see different
    weights, or others than the adapters belong to."""
    model, here = spec.first_model, ""
    if processes.speaks_for_its_node:
        here = merge_adapters.digest_of(model) if copy is None else copy.place.digest_of_first(model)
    seen = {digest for digest in gather_json(here) if digest}
    if len(seen) > 1:
        raise ProgramFailed(
            f"{model}: the nodes see different weights in it; each needs the same first model"
        )
    base = Base("", seen.pop())
    if spec.trainer_state is not None:
        before = checkpoints.read_manifest(spec.trainer_state.parent).base
        if before is not None and (before.folder, before.digest) != (base.folder, base.digest):
            raise materialise.another_model(spec.trainer_state.parent, model)
    return None if merge_adapters.why_not_mergeable(model) else base


def local_state(processes: Processes, settings: Settings, copy: NodeCopy | None) -> LocalState | None:
    """Where this node keeps the trainer's state between two versions that have it; None if some node has no place. The states of a critic
    and of DeepSpeed's processes are not kept there. Every process must call this."""
    if settings.trainer.backend != "torch" or settings.algorithm.has_critic:
        return None
    place = copy.place if copy is not None else None
    everywhere = all(gather_json(place is not None))
    nested = settings.as_json()
    held_how = {name: nested[name] for name in ("trainer", "lora")}
    return LocalState(place, processes, held_how) if place is not None and everywhere else None


def whole_model(version: Path, processes: Processes, copy: NodeCopy | None, first_model: Path) -> Path:
    """A model folder with all weights of a version: this node's copy, the version's own, or a new one that is made of its base and delta.
    With adapters the folder may lack weights, since the adapters are put into the first model anyway. Every process must call this.
    Raises ProgramFailed, OSError."""
    model = version / "model"
    base = checkpoints.read_manifest(version).base
    if base is not None and base.folder:
        if copy is None:
            raise ProgramFailed(
                f"{version.name} is not whole, and this node has no place to make its weights; give checkpoint.weights_dir=DIR"
            )
        why_not = ""
        # The first process of each node makes it; the others wait.
        if copy.place.nearest(model) == model and processes.speaks_for_its_node:
            why_not = copy.place.confirm(model, lambda: None, first_model)
        for reason in filter(None, gather_json(why_not)):
            raise ProgramFailed(reason)
    return model if copy is None else copy.place.nearest(model)


def _load_start(
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
        here = whole_model(version, processes, copy, first)
        return Beginning(load(here, version / "trainer", policy_version), model, state_in)
    own = local_state(processes, settings, copy)
    held = own.find(version.name, spec.policy) if own is not None else None
    if held is not None:
        here = whole_model(version, processes, copy, first)
        return Beginning(load(here, held, policy_version), model, state_in, since)
    origin, state, number = first, None, 0
    if state_in is not None:
        before = version.parent / state_in
        origin, state = whole_model(before, processes, copy, first), before / "trainer"
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
