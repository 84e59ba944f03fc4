"""Runs forward passes without gradients, for the trainer's own log-probabilities of a batch, and those of a reference policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fsbarrier.settings.sections import Settings
from fsbarrier.training import policy, sharding
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.logprob_gap import both_exact
from fsbarrier.training.micro_batch import MicroBatch, plan
from fsbarrier.training.policy_model import PolicyModel, TokenModel, packs
from fsbarrier.training.processes import Processes
from fsbarrier.training.sharding import Layout
from fsbarrier.training.trainer import Trainer


def with_old(trainer: Trainer, batch: TrainingBatch, settings: Settings) -> TrainingBatch:
    """Add the denominator of the ratio to the batch (`algorithm.old_logprobs`), and the self-certainty if it is wanted. Every process
    must call this.

    Sequences sampled by another policy keep the engine's log-probabilities, because their ratio refers to that policy.
    """
    wanted, certainty = recomputes(settings, trainer.processes), settings.algorithm.self_certainty > 0
    if not batch.steps or not (wanted or certainty):
        return batch
    numbers = numbers_of_tokens(trainer.backend.model, batch, settings, trainer.processes)
    if certainty:
        batch = replace(batch, certainty=numbers[2])
    if not wanted:
        return batch
    current = batch.current.bool().repeat_interleave(batch.offsets.diff())
    return replace(batch, old=torch.where(current, numbers[0], batch.logprobs))


def recomputes(settings: Settings, processes: Processes) -> bool:
    """Whether the denominator of the ratio is computed by the trainer."""
    algorithm = settings.algorithm
    if algorithm.old_logprobs != "auto":
        return algorithm.old_logprobs == "trainer"
    # The loss `rft` has no ratio.
    rounded = algorithm.loss != "rft" and not both_exact(settings, processes)
    return algorithm.mismatch != "none" or rounded


def with_reference(
    folder: Path, layout: Layout, processes: Processes, batch: TrainingBatch, settings: Settings
) -> TrainingBatch:
    """Add the log-probabilities of the policy in `folder`, which is loaded temporarily. Every process must call this."""
    if not batch.steps:
        return batch
    model = loaded_for_reading(folder, layout, processes, settings)
    return replace(batch, reference=numbers_of_tokens(model, batch, settings, processes)[0])


def loaded_for_reading(folder: Path, layout: Layout, processes: Processes, settings: Settings) -> PolicyModel:
    """A policy without gradients, sharded like the trained one."""
    if layout.shards == 1:
        model = PolicyModel(policy.load(folder, settings.trainer, processes.dtype).requires_grad_(False))
        model.to(processes.device)
        return model
    causal = policy.without_weights(folder, settings.trainer)
    model = PolicyModel(causal.requires_grad_(False))
    sharding.shard(model, layout, processes)
    policy.fill(causal, folder, settings.trainer, processes)
    return model


def held_out_loss(trainer: Trainer, batch: TrainingBatch, settings: Settings) -> float | None:
    """The mean cross-entropy per token of the held-out sequences; None if there are none. Every process must call this."""
    indices = batch.held_out()
    if not indices:
        return None
    tokens = int(batch.sampled_tokens(torch.tensor(indices)).sum())
    logprobs = numbers_of_tokens(trainer.backend.model, batch, settings, trainer.processes, indices)[0]
    return -float(logprobs.double().sum()) / tokens


@torch.no_grad()
def numbers_of_tokens(
    model: TokenModel,
    batch: TrainingBatch,
    settings: Settings,
    processes: Processes,
    indices: list[int] | None = None,
) -> Tensor:
    """Compute the model's outputs for the sampled tokens of these sequences (None: of all): float32 [outputs, tokens of the batch], each
    row like `batch.logprobs`, the same on every process."""
    packed = packs(model.causal)
    indices = list(range(len(batch.weights))) if indices is None else indices
    mine = plan(
        indices,
        batch.lengths(),
        processes.world,
        most_tokens=settings.trainer.max_tokens_per_micro_batch,
        packed=packed,
    )[processes.rank]
    result = torch.zeros(0)
    for chosen in mine:
        # A process without sequences must still take part in the all-gathers of a sharded policy.
        micro = MicroBatch.of(batch, chosen or indices[:1], processes.device, packed=packed)
        outputs = model(micro.inputs, micro.wanted, settings.rollout.temperature)
        placed = torch.stack([micro.placed(values) for values in outputs])
        if not len(result):
            result = torch.zeros(len(placed), len(batch.token_ids), device=processes.device)
        for row, index in enumerate(chosen):
            begin, end = batch.offsets[index : index + 2].tolist()
            result[:, begin:end] = placed[:, row, : end - begin]
    return processes.sum(result).cpu()
