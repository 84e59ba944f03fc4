"""Computes what an engine must compute with the new weights (rundir/known_logprobs.py), right after they are made.

The comparison in the update (logprob_gap.py) is only possible for tokens that the policy in memory has sampled. With `rollout.ahead=1`
there are none from the second iteration on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from fsbarrier.engine.model import max_positions, placeholder_ids, within_positions
from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir.known_logprobs import KnownLogprobs, KnownSequence
from fsbarrier.settings.sections import Settings
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.log_prob_pass import numbers_of_tokens
from fsbarrier.training.logprob_gap import limit_of
from fsbarrier.training.trainer import Trainer

# How many sampled tokens are compared, of how many sequences at most.
COMPARED, SEQUENCES = 256, 16
# The longest piece of a sequence. vLLM holds the logits of all its tokens at once.
WINDOW = 256


def known_logprobs(trainer: Trainer, batch: TrainingBatch, settings: Settings) -> KnownLogprobs | None:
    """The log-probabilities that the policy gives to some sampled tokens of the batch now; None if nothing was sampled. Every process must
    call this. Raises ProgramFailed if they are no numbers.

    A model that takes images has none: the engine's log-probabilities of given tokens count placeholders for images as possible tokens.
    """
    config = trainer.model.causal.config.to_dict()
    longest = within_positions(settings.engine.max_model_len, max_positions(config))
    # The engine must have room for one token more.
    small = None if placeholder_ids(config) else windows(batch, longest - 1)
    if small is None:
        return None
    as_is = replace(settings, rollout=replace(settings.rollout, temperature=1.0))
    log_probs = numbers_of_tokens(trainer.backend.model, small, as_is, trainer.processes)[0]
    sampled = small.loss_mask.bool()
    if not bool(log_probs[sampled].isfinite().all()):
        raise ProgramFailed(
            "with the new weights a log-probability is no finite number; nothing was saved; try a smaller optimizer.lr"
        )
    rows = []
    for begin, end in pairwise(small.offsets.tolist()):
        pairs = zip(log_probs[begin:end].tolist(), sampled[begin:end].tolist(), strict=True)
        tokens = tuple(small.token_ids[begin:end].tolist())
        rows.append(KnownSequence(tokens, tuple(number if wanted else None for number, wanted in pairs)))
    return KnownLogprobs(limit_of(settings, trainer.processes), tuple(rows))


def windows(batch: TrainingBatch, longest: int) -> TrainingBatch | None:
    """Pieces of the first sequences of a batch, each with some tokens before its first sampled one; None if nothing was sampled."""
    tokens, masks = list[Tensor](), list[Tensor]()
    for begin, end in pairwise(batch.offsets.tolist()):
        if len(tokens) == SEQUENCES or sum(int(mask.sum()) for mask in masks) >= COMPARED:
            break
        # The first token has no prediction.
        sampled = batch.loss_mask[begin + 1 : end].nonzero()
        if not len(sampled):
            continue
        first = begin + max(0, int(sampled[0]) + 1 - min(WINDOW, longest) // 2)
        window = slice(first, min(end, first + min(WINDOW, longest)))
        tokens.append(batch.token_ids[window])
        masks.append(batch.loss_mask[window].clone())
        masks[-1][0] = 0
    return of_tokens(tokens, masks) if tokens else None


def of_tokens(tokens: Sequence[Tensor], masks: Sequence[Tensor]) -> TrainingBatch:
    """A batch that nobody trains on."""
    none = torch.zeros(len(tokens))
    ends = torch.tensor([len(sequence) for sequence in tokens]).cumsum(0)
    return TrainingBatch(
        token_ids=torch.cat([*tokens]),
        loss_mask=torch.cat([*masks]),
        logprobs=torch.zeros(int(ends[-1])),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), ends]),
        weights=none,
        current=none,
        engines=none,
        continues=none,
        groups=none,
        steps=(),
    )
