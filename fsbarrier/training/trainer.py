"""The policy and its optimizer as one process holds them: loaded, resumed, and saved as a new policy version.

A Trainer knows nothing of a batch, so it may outlive one; optimizer_step.py trains it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsbarrier.settings.sections import OptimizerSettings
from fsbarrier.training import checkpoint_write, policy
from fsbarrier.training.checkpoint_write import NewVersion
from fsbarrier.training.micro_batch import MicroBatch
from fsbarrier.training.processes import Processes
from fsbarrier.training.trainer_state import TrainerState, restore


@dataclass
class Trainer:
    """`model` and `optimizer` are accelerate's, which wraps them; `optimizer_steps` counts from the run's first update."""

    processes: Processes
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    optimizer_steps: int
    # Whether the model can leave out the logits of positions that no loss needs.
    keeps_logits: bool
    # What of a micro-batch, padding included, has logits of a bearable size.
    max_tokens: int

    @classmethod
    def load(
        cls,
        processes: Processes,
        settings: OptimizerSettings,
        *,
        model_folder: Path,
        state_folder: Path | None,
        policy_version: int,
    ) -> Self:
        """The policy in `model_folder`, with the trainer state that belongs to it; None: a new optimizer.

        Raises UsageError (no whole model), ProgramFailed (a state that is damaged, or another version's).
        """
        model = policy.load(model_folder)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        steps = (
            0 if state_folder is None else restore(state_folder, trained(model), optimizer, policy_version)
        )
        model, optimizer = processes.accelerator.prepare(model, optimizer)
        model.train()
        # The logits are in float32.
        max_tokens = max(1, processes.max_logits_bytes() // (4 * vocabulary))
        return cls(processes, model, optimizer, steps, keeps_logits, max_tokens)

    def logits(self, whole: MicroBatch, needed: MicroBatch) -> Tensor:
        """[batch, columns of `needed`, vocabulary], where `needed` is `whole` from some column on."""
        columns = needed.tokens.shape[1]
        fewer = {"logits_to_keep": columns} if self.keeps_logits else {}
        output = self.model(input_ids=whole.tokens, attention_mask=whole.attention, use_cache=False, **fewer)
        logits: Tensor = output.logits[:, -columns:]
        return logits

    def save(self, out: Path, *, model_folder: Path, policy_version: int) -> None:
        """Leave the new policy version in `out`. Every process must call this, and writes its part; all fail together. What the model's
        folder has beside its weights is copied. Raises ProgramFailed."""
        model = self.processes.accelerator.unwrap_model(self.model)
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
