"""The policy and its optimizer as one process holds them: loaded, resumed, and saved as a new policy version.

A Trainer knows nothing of a batch, so it may outlive one; optimizer_step.py trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsbarrier.settings.sections import Settings
from fsbarrier.training import checkpoint_write, policy
from fsbarrier.training.checkpoint_write import NewVersion
from fsbarrier.training.policy_model import PolicyModel, packs
from fsbarrier.training.processes import Processes
from fsbarrier.training.trainer_state import TrainerState, restore


@dataclass
class Trainer:
    """`model` and `optimizer` are accelerate's, which wraps them; `optimizer_steps` counts from the run's first update."""

    processes: Processes
    model: PolicyModel
    optimizer: torch.optim.Optimizer
    optimizer_steps: int
    # Whether a micro-batch may be packed: policy_model.packs.
    packs: bool

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
        """The policy in `model_folder`, with the trainer state that belongs to it; None: a new optimizer.

        Raises UsageError (no whole model), ProgramFailed (a state that is damaged, or another version's).
        """
        causal = policy.load(model_folder, settings.trainer)
        model = PolicyModel(causal, settings.trainer.max_logits_mb << 20)
        chosen = settings.optimizer
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=chosen.lr, betas=chosen.betas, weight_decay=chosen.weight_decay
        )
        steps = (
            0 if state_folder is None else restore(state_folder, trained(causal), optimizer, policy_version)
        )
        model, optimizer = processes.accelerator.prepare(model, optimizer)
        model.train()
        return cls(processes, model, optimizer, steps, packs(causal))

    def save(self, out: Path, *, model_folder: Path, policy_version: int) -> None:
        """Leave the new policy version in `out`. Every process must call this, and writes its part; all fail together. What the model's
        folder has beside its weights is copied. Raises ProgramFailed."""
        model = self.processes.accelerator.unwrap_model(self.model).causal
        dtype = self.processes.serving_dtype
        state = TrainerState.of(
            trained(model),
            self.optimizer.optimizer,
            self.optimizer_steps,
            # Weights that are served in less precision must not lose it from one update to the next.
            without_weights=dtype is torch.float32,
        )
        new = NewVersion(policy_version, model, model.state_dict(), dtype, model_folder, state)
        checkpoint_write.save(out, new, self.processes.rank, self.processes.world)


def trained(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters that the optimizer changes, by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}
