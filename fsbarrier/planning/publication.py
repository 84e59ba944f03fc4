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
    """Bytes in the run directory. `kind`: of the versions between whole ones ("adapters", "delta", or "whole" if all are); `usual`: of
    such a version; `mean`: of one in the long run, with the trainer's state; `read`: what a node that only samples reads of each, and
    `joins`: what one reads that joins. `repeated`: how many updates are trained again at most if a node is lost."""

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
    """`model`, `state`, `adapters`: the bytes of each. A plan does not know the run directory; on a local disk all versions without
    adapters are whole."""
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
    # A node that only samples makes each version of the one before, and reads both deltas.
    read = (model + (every - 1) * 2 * delta) // every
    mean = weights + state // state_every
    return Publication("delta", model, delta, mean, read, model + delta, state, state_every - 1)
