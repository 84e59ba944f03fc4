"""Loads, resumes and saves what one process of an update trains: the policy, and the critic if there is one.

A Trainer is independent of batches, so it can be kept between updates; optimizer_step.py trains it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from fsbarrier.planning.memory import UpdateLoad
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.checkpoints import Base
from fsbarrier.rundir.known_logprobs import KnownLogprobs
from fsbarrier.settings.sections import OptimizerSettings, Settings
from fsbarrier.training import checkpoint_write, policy
from fsbarrier.training.architecture import shape_of
from fsbarrier.training.checkpoint_write import NewVersion, NodeCopy
from fsbarrier.training.deepspeed_backend import (
    DeepSpeedBackend,
    configuration,
    layout_of,
    partitioned_model,
)
from fsbarrier.training.delta_write import Against
from fsbarrier.training.lora import Adapters
from fsbarrier.training.policy_model import PolicyModel, TokenModel, ValueModel, packs
from fsbarrier.training.processes import Processes
from fsbarrier.training.sharding import Layout, choose_layout
from fsbarrier.training.torch_backend import TorchBackend
from fsbarrier.training.trainer_state import CRITIC, TrainerState


@dataclass
class Trained:
    """A model with its optimizer. `optimizer_steps` counts from the run's first update."""

    processes: Processes
    layout: Layout
    model: TokenModel
    backend: TorchBackend | DeepSpeedBackend
    optimizer_steps: int
    # Whether micro-batches may be packed: policy_model.packs.
    packs: bool


@dataclass
class Trainer(Trained):
    """The policy with its optimizer. `kl_in_reward`: the current coefficient, which `algorithm.kl_target` adapts."""

    # The adapters that are trained instead of the policy; None: the full policy is trained.
    adapters: Adapters | None
    kl_in_reward: float
    # The critic with its optimizer; None without `algorithm.advantage=gae`.
    critic: Trained | None

    @classmethod
    def load(
        cls,
        processes: Processes,
        settings: Settings,
        *,
        model_folder: Path,
        state_folder: Path | None,
        policy_version: int,
    ) -> Self:
        """Load the policy in `model_folder`, with the trainer state in `state_folder`; None: a fresh optimizer.
        With adapters (`lora.rank`) this is the base model, and the trainer state contains the adapters.

        Raises UsageError (incomplete model, or impossible settings), ProgramFailed (damaged state, or of another version).
        """
        deepspeed = settings.trainer.backend == "deepspeed"
        config = configuration(settings, processes) if deepspeed else {}
        layout = (
            layout_of(settings, processes)
            if deepspeed
            else choose_layout(
                settings.trainer, processes, lambda: update_load(model_folder, settings, processes)
            )
        )
        lora = settings.lora
        # A sharded policy is loaded in parts: only the first process ever holds all weights.
        in_parts = not layout.has_it_whole and not lora.rank
        if in_parts and deepspeed:
            causal = partitioned_model(model_folder, settings, config, processes)
        elif in_parts:
            causal = policy.without_weights(model_folder, settings.trainer)
        else:
            # Frozen weights do not need more precision than the computation.
            exact = processes.dtype if lora.rank else torch.float32
            causal = policy.load(model_folder, settings.trainer, exact)
        adapters = Adapters.put_into(causal, lora, model_folder) if lora.rank else None
        model = PolicyModel(causal)
        model.train()
        backend: TorchBackend | DeepSpeedBackend
        if deepspeed:
            backend = DeepSpeedBackend(model, settings, config, processes)
        else:
            backend = TorchBackend(model, settings.optimizer, layout, processes)
            if in_parts:
                policy.fill(causal, model_folder, settings.trainer, processes)
        state = backend.restore(state_folder, policy_version) if state_folder else None
        steps, kl = (0, None) if state is None else (state.optimizer_steps, state.kl_in_reward)
        kl = settings.algorithm.kl_in_reward if kl is None else kl
        critic = None
        if settings.algorithm.has_critic:
            critic = load_critic(processes, settings, layout, model_folder, state_folder, policy_version)
        return cls(processes, layout, model, backend, steps, packs(causal), adapters, kl, critic)

    def save(
        self,
        out: Path,
        *,
        model_folder: Path,
        policy_version: int,
        state_in: str | None = "",
        trained_since: tuple[str, ...] = (),
        copy: NodeCopy | None = None,
        known: KnownLogprobs | None = None,
        base: Base | None = None,
        whole: bool = True,
        against: Against | None = None,
    ) -> str:
        """Save the new policy version to `out`; returns its identity.

        Every process must call this and writes its part; if one fails, all fail. Also copies the model folder's other files.
        `state_in`: "": the trainer state is saved too; otherwise see checkpoints.Manifest, also for `trained_since`. `known`,
        `base`, `whole`, `against`: see NewVersion. Raises ProgramFailed.
        """
        model, adapters = self.model.causal, self.adapters
        dtype = self.processes.serving_dtype
        state = self.state() if state_in == "" else None
        critic = None
        if state is not None and self.critic is not None:
            critic = critic_to_save(self.critic, policy_version, dtype)
        weights = self.backend.weights() if adapters is None else adapters.weights(model)
        new = NewVersion(
            policy_version=policy_version,
            model=model,
            weights=weights,
            dtype=dtype,
            beside=model_folder,
            trainer=state,
            adapters=adapters,
            state_in=state_in,
            trained_since=trained_since,
            copy=copy,
            critic=critic,
            known=known,
            base=base,
            whole=whole,
            against=against,
        )
        digest = checkpoint_write.save(out, new, self.processes.rank, self.processes.world)
        return checkpoints.identity(out.name, digest)

    def state(self) -> TrainerState:
        """This process's part of what is needed to resume."""
        state = self.backend.state(
            self.optimizer_steps,
            # Store fp32 weights if the served ones are less precise. Adapters are not served separately.
            without_weights=self.processes.serving_dtype is torch.float32 and self.adapters is None,
        )
        return replace(state, kl_in_reward=self.kl_in_reward)

    def leaves_room(self, settings: Settings) -> bool:
        """Whether the engine has room on this process's accelerator while the trainer stays there."""
        memory = self.processes.accelerator_memory()
        if memory is None:
            return True
        free, total = memory
        if not settings.manages_engine or settings.rl_phase == "update":
            return True
        # An engine allocates this share of the memory when it wakes, or has kept it allocated.
        return free >= int(settings.engine.gpu_memory_utilization * total)


def load_critic(
    processes: Processes,
    settings: Settings,
    layout: Layout,
    model_folder: Path,
    state_folder: Path | None,
    policy_version: int,
) -> Trained:
    """Load the critic beside a trainer state; without a state, make a new one from `critic.model` or the policy's folder. Raises the
    errors of Trainer.load."""
    trainer, folder, state = settings.trainer, Path(settings.critic.model or model_folder), None
    if state_folder is not None:
        stored = state_folder.parent / CRITIC
        folder, state = stored / "model", stored / "trainer"
    in_parts = not layout.has_it_whole
    load = policy.without_weights if in_parts else policy.load
    classifier = load(folder, trainer, value=True)
    # Record the class that it has now, even if it was initialised from a policy.
    classifier.config.architectures = [type(classifier).__name__]
    model = ValueModel(classifier)
    model.train()
    backend = TorchBackend(model, critics_optimizer(settings), layout, processes)
    if in_parts:
        policy.fill(classifier, folder, trainer, processes, value=True)
    steps = backend.restore(state, policy_version).optimizer_steps if state else 0
    return Trained(processes, layout, model, backend, steps, packs(classifier))


def critic_to_save(critic: Trained, policy_version: int, dtype: torch.dtype) -> NewVersion:
    """The critic's part of a policy version."""
    backend, exact = critic.backend, dtype is torch.float32
    state = backend.state(critic.optimizer_steps, without_weights=exact)
    return NewVersion(
        policy_version, critic.model.causal, backend.weights(), dtype, beside=None, trainer=state
    )


def critics_optimizer(settings: Settings) -> OptimizerSettings:
    """The settings of the policy's optimizer, with the critic's learning rate."""
    return replace(settings.optimizer, lr=settings.critic.lr)


def update_load(model_folder: Path, settings: Settings, processes: Processes) -> UpdateLoad:
    """The memory load of one process of this update without sharding. Raises UsageError if transformers cannot make the model."""
    accelerated = processes.device.type != "cpu"
    shape = shape_of(model_folder, settings.lora)
    return UpdateLoad.whole(shape, settings, element=processes.dtype.itemsize, accelerated=accelerated)
