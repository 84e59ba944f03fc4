"""The policy and its optimizer as one process holds them: loaded, resumed, and saved as a new policy version.

A Trainer knows nothing of a batch, so it may outlive one; optimizer_step.py trains it.
"""

from __future__ import annotations

import inspect
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from fsbarrier import files
from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import OptimizerSettings
from fsbarrier.training import policy
from fsbarrier.training.micro_batch import MicroBatch
from fsbarrier.training.processes import Processes
from fsbarrier.training.tensor_file import load_tensors

# The file in a policy version's folder "trainer" from which the next update goes on.
STATE = "state.pt"


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
            0 if state_folder is None else _restore(state_folder / STATE, model, optimizer, policy_version)
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
        """Leave the new policy version in `out`. Every process must call this; the main one writes, and the others wait, so that
        all fail together. What the model's folder has beside its weights is copied. Raises ProgramFailed."""
        accelerator = self.processes.accelerator
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            try:
                self._write(out, model_folder, policy_version)
            except (OSError, RuntimeError, SafetensorError) as error:
                # Each library says in its own way that a disk is full.
                raise ProgramFailed(f"{out}: cannot be saved: {str(error).splitlines()[0]}") from None
        accelerator.wait_for_everyone()

    def _write(self, out: Path, model_folder: Path, policy_version: int) -> None:
        if (out / checkpoints.MANIFEST).exists():
            raise ProgramFailed(f"{out} is a complete policy version already; nothing was written")
        # Of an attempt that did not get as far as its manifest.
        for leftover in ("model", "trainer"):
            shutil.rmtree(out / leftover, ignore_errors=True)
        model = self.processes.accelerator.unwrap_model(self.model)
        dtype = self.processes.serving_dtype
        policy.save(model, model_folder, out / "model", dtype)
        # Weights that are served in less precision must not lose it from one update to the next.
        exact = dtype is torch.float32
        state = {
            "optimizer": self.optimizer.optimizer.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "policy_version": policy_version,
            "master": {} if exact else {k: v.cpu() for k, v in model.state_dict().items()},
        }
        files.make_dirs(out / "trainer")
        torch.save(state, out / "trainer" / STATE)
        checkpoints.write_manifest(out, policy_version)


def _restore(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, policy_version: int
) -> int:
    """Go on from a trainer state, whatever the world size was then; gives the optimizer steps that were made."""
    state = load_tensors(path, "trainer state")
    try:
        if state["policy_version"] != policy_version:
            raise ValueError(
                f"it belongs to policy version {state['policy_version']}, the model is version {policy_version}"
            )
        if state["master"]:
            model.load_state_dict(state["master"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["optimizer_steps"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ProgramFailed(
            f"{path}: the trainer cannot go on from it: {str(error).splitlines()[0]}"
        ) from None
