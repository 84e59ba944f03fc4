"""What a policy gives the tokens of a batch, without a gradient: the trainer's own log-probabilities, and a reference policy's."""

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
from fsbarrier.training.policy_model import PolicyModel, packs
from fsbarrier.training.processes import Processes
from fsbarrier.training.sharding import Layout
from fsbarrier.training.stored_tensors import StoredTensors
from fsbarrier.training.trainer import Trainer


def with_old(trainer: Trainer, batch: TrainingBatch, settings: Settings) -> TrainingBatch:
    """The batch with what the ratio is to (`algorithm.old_logprobs`). Every process must call this.

    What another policy sampled stays as the engine gave it: the ratio is to that policy.
    """
    if not batch.steps or not recomputes(settings, trainer.processes):
        return batch
    own = log_probs(trainer.backend.model, batch, settings, trainer.processes)
    current = batch.current.bool().repeat_interleave(batch.offsets.diff())
    return replace(batch, old=torch.where(current, own, batch.logprobs))


def recomputes(settings: Settings, processes: Processes) -> bool:
    """Whether the ratio is to the trainer's own log-probabilities."""
    algorithm = settings.algorithm
    if algorithm.old_logprobs != "auto" or algorithm.loss == "rft":
        return algorithm.old_logprobs == "trainer"
    return algorithm.mismatch != "none" or not both_exact(settings, processes)


def with_reference(
    folder: Path, layout: Layout, processes: Processes, batch: TrainingBatch, settings: Settings
) -> TrainingBatch:
    """The batch with the log-probabilities of the policy in `folder`, which is let go again. Every process must call this."""
    if not batch.steps:
        return batch
    model = loaded_for_reading(folder, layout, processes, settings)
    return replace(batch, reference=log_probs(model, batch, settings, processes))


def loaded_for_reading(folder: Path, layout: Layout, processes: Processes, settings: Settings) -> PolicyModel:
    """A policy without gradients, laid out as the trained one is."""
    empty = policy.without_weights(folder, settings.trainer) if layout.shards > 1 else None
    causal = empty or policy.load(folder, settings.trainer, processes.dtype)
    model = PolicyModel(causal.requires_grad_(False), settings.trainer.max_logits_mb << 20)
    if layout.shards == 1:
        model.to(processes.device)
        return model
    sharding.shard(model, layout, processes)
    if empty is not None:
        with StoredTensors.of_model(folder) as stored, torch.no_grad():
            for name, parameter in empty.named_parameters():
                stored.fill(name, parameter)
    return model


@torch.no_grad()
def log_probs(model: PolicyModel, batch: TrainingBatch, settings: Settings, processes: Processes) -> Tensor:
    """float32, like `batch.logprobs`: of every sampled token, the same on every process."""
    packed = packs(model.causal)
    indices = list(range(len(batch.weights)))
    mine = plan(
        indices,
        batch.lengths(),
        processes.world,
        most=settings.trainer.micro_batch,
        most_tokens=settings.trainer.max_tokens_per_micro_batch,
        packed=packed,
    )[processes.rank]
    found = torch.zeros(len(batch.token_ids), device=processes.device)
    for chosen in mine:
        # Whoever has no sequence left takes part in gathering a sharded policy all the same.
        micro = MicroBatch.of(batch, chosen or indices[:1], processes.device, packed=packed)
        placed = micro.placed(model(micro.inputs, micro.wanted, settings.rollout.temperature)[0])
        for row, index in enumerate(chosen):
            begin, end = batch.offsets[index : index + 2].tolist()
            found[begin:end] = placed[row, : end - begin]
    return processes.sum(found).cpu()
