"""Estimates what an update moves through the run directory, and what a lost node costs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsbarrier.settings.sections import Settings

# The bytes of a delta beside those of the weights, at a learning rate of 1e-6 and some steps an update. The share grows about as the root
# of the learning rate (measured: a fifth at 2e-5), and a version with more than half of the bytes is published whole.
DELTA_SHARE, AT_RATE, MOST = 1 / 20, 1e-6, 1 / 2


@dataclass(frozen=True, slots=True)
class Publication:
    """Bytes that versions take in the run directory, and that nodes read there.

    `kind`: what is published between two whole versions: "adapters" or "delta"; "whole" if all versions are whole. `whole`, `usual`: the
    size of a whole version, and of one between two of them. `mean`: the mean size of a version with the trainer's state, which alone has
    the size `state`. `read`: what a node that only samples reads of each version. `joins`: what a node reads when it joins. `repeated`: how
    many updates at most are trained again if a node is lost.
    """

    kind: str
    whole: int
    usual: int
    mean: int
    read: int
    joins: int
    state: int
    repeated: int


def publication(
    settings: Settings, *, model: int, state: int, adapters: int, in_float32: bool
) -> Publication:
    """Estimate for versions of `model` bytes, with a trainer's state of `state` bytes and `adapters` of so many bytes. It assumes that the
    run directory is on a network mount; on a local disk all versions without adapters are whole."""
    kept = settings.checkpoint
    copies = kept.weights_dir != "none" and settings.engine.nodes == 1 and settings.manages_engine
    own_trainer = settings.trainer.command is not None
    every = kept.whole_every
    if adapters and copies and not own_trainer:
        state_every = kept.trainer_every or 1
        mean = adapters + state // state_every
        return Publication(
            "adapters", model, adapters, mean, adapters, adapters + model, state, state_every - 1
        )
    if in_float32 or not copies or own_trainer or every == 1:
        state_every = kept.trainer_every or 1
        mean = model + state // state_every
        return Publication("whole", model, model, mean, model, model, state, state_every - 1)
    delta = int(model * min(MOST, DELTA_SHARE * math.sqrt(settings.optimizer.lr / AT_RATE)))
    state_every = kept.trainer_every or every
    weights = (model + (every - 1) * delta) // every
    # A node that only samples makes each version from its copy of the one before: it undoes that one's delta and applies the new one, so
    # it reads both.
    read = (model + (every - 1) * 2 * delta) // every
    mean = weights + state // state_every
    return Publication("delta", model, delta, mean, read, model + delta, state, state_every - 1)
