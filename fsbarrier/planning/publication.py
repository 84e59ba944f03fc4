"""Estimates what an update moves through the run directory, and what a lost node costs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsbarrier.settings.sections import Settings
from fsbarrier.store.reading import GIB, MIB
from fsbarrier.wording import counted, gib

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


def nodes_have_copies(settings: Settings) -> bool:
    """Whether each node may have a copy of the newest weights, if it has room."""
    return (
        settings.checkpoint.weights_dir != "none" and settings.engine.nodes == 1 and settings.manages_engine
    )


def publishes_adapters(settings: Settings) -> bool:
    """Whether versions are adapters alone, until a session's last."""
    usable = nodes_have_copies(settings) or settings.lora.serve == "adapter"
    return settings.lora.rank > 0 and usable and settings.trainer.command is None


def publication(
    settings: Settings, *, model: int, state: int, adapters: int, in_float32: bool, processes_end: bool
) -> Publication:
    """Estimate for versions of `model` bytes, with a trainer's state of `state` bytes and `adapters` of so many bytes. `processes_end`:
    the trainer's processes end after each update. It assumes that the run directory is on a network mount; on a local disk all versions
    without adapters are whole."""
    kept = settings.checkpoint
    copies, own_trainer = nodes_have_copies(settings), settings.trainer.command is not None
    every = kept.whole_every
    if publishes_adapters(settings):
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
    # What a critic and DeepSpeed need is not kept on nodes.
    stays = not processes_end or (settings.trainer.backend == "torch" and not settings.algorithm.has_critic)
    state_every = kept.trainer_every or (every if stays else 1)
    weights = (model + (every - 1) * delta) // every
    # A node that only samples makes each version from its copy of the one before: it undoes that one's delta and applies the new one, so
    # it reads both.
    read = (model + (every - 1) * 2 * delta) // every
    mean = weights + state // state_every
    return Publication("delta", model, delta, mean, read, model + delta, state, state_every - 1)


def publication_lines(moved: Publication) -> list[str]:
    """What is moved and what a lost node costs, for people."""
    kinds = {
        "adapters": "adapters alone",
        "delta": f"a delta of about {size_text(moved.usual)} between whole versions, if nodes have copies of weights",
        "whole": "each version whole",
    }
    lost = (
        "a lost node costs no finished update"
        if not moved.repeated
        else f"a lost node costs at most {counted(moved.repeated, 'update')}, trained again from stored batches (none with "
        "checkpoint.trainer_every=1)"
    )
    return [
        f"publication   {kinds[moved.kind]}; {size_text(moved.mean)} an update on average, with the trainer state; a node that only "
        f"samples reads {size_text(moved.read)}, one that joins {size_text(moved.joins)}",
        f"  {lost}",
    ]


def size_text(amount: int) -> str:
    """An amount of memory or storage for people."""
    return gib(amount) if amount >= GIB // 10 else f"{amount / MIB:.1f} MiB"
