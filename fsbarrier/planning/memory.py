"""How much memory one process of an update needs, by part, and which way of sharding fits. Pure arithmetic.

An estimate, not a measurement: activations depend on kernels, and allocators leave gaps. What an update really took stands beside it
in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings.sections import Settings

Shard = Literal["none", "node", "all"]
Offload = Literal["none", "optimizer", "all"]

GIB = 1 << 30
# The context, the communication buffers and the gaps of the allocator on each accelerator.
OVERHEAD_BYTES = 2 * GIB
# Master weights, gradients and each of the two moments are in float32.
EXACT = 4
# Logits are computed in float32, and their gradient with them.
LOGITS_COPIES = 2
# A sharded update holds two units at a time in the type it computes in, one of which it fetches ahead, and the gradient of one
# in that type and in float32.
UNITS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class UpdateLoad:
    """One process's part of an update. `shards`: over how many processes one copy of the model is split.

    `element`: the bytes of a number in the type it computes in. `tokens`: of one micro-batch, padding included. `logits`: so
    many positions have logits at once. `trained`: the parameters that have gradients, fewer than all with adapters.
    """

    shape: ModelShape
    shards: int
    element: int
    tokens: int
    logits: int
    trained: int
    checkpointing: bool = False
    offload: Offload = "none"

    @classmethod
    def whole(cls, shape: ModelShape, settings: Settings, *, element: int, accelerated: bool) -> Self:
        """Of an update with these settings where each process has a copy of its own."""
        trainer, lora = settings.trainer, settings.lora
        # A trajectory that is longer than a micro-batch is alone in it.
        tokens = max(settings.engine.max_model_len, trainer.max_tokens_per_micro_batch)
        checkpointing = trainer.gradient_checkpointing
        return cls(
            shape,
            shards=1,
            element=element,
            tokens=tokens,
            logits=min(tokens, (trainer.max_logits_mb << 20) // (LOGITS_COPIES * EXACT * shape.vocabulary)),
            trained=shape.adapter_parameters(lora.rank, lora.targets) if lora.rank else shape.parameters,
            checkpointing=accelerated if checkpointing is None else checkpointing,
            offload=trainer.offload,
        )

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes on the accelerator, by part."""
        shape, shards = self.shape, self.shards
        # With adapters the base has no master weights of its own.
        base = self.element if self.trained < shape.parameters else EXACT
        sharded = (
            shape.parameters * base + (shape.parameters > self.trained) * self.trained * EXACT
        ) // shards
        unit = shape.largest_unit
        # A copy that is whole in the type it computes in is not gathered.
        gathered = UNITS_AHEAD * unit * self.element if shards > 1 or self.element < base else 0
        if gathered and self.trained == shape.parameters:
            gathered += unit * (self.element + EXACT)
        gradients, moments = self.trained * EXACT // shards, 2 * self.trained * EXACT // shards
        return {
            "weights": 0 if self.offload == "all" else sharded,
            "gathered": gathered,
            "gradients": 0 if self.offload == "all" else gradients,
            "moments": moments if self.offload == "none" else 0,
            "activations": activation_bytes(
                shape, self.tokens, self.element, checkpointing=self.checkpointing
            ),
            "logits": self.logits * shape.vocabulary * EXACT * LOGITS_COPIES,
            "overhead": OVERHEAD_BYTES,
        }

    @property
    def total(self) -> int:
        """The most that is there at once, in bytes."""
        parts = self.parts
        if self.offload != "optimizer":
            return sum(parts.values())
        # The optimizer steps on the accelerator: all moments are there then, and what the backward pass needed no longer is.
        moments = replace(self, offload="none").parts["moments"]
        stepping = parts["weights"] + parts["gradients"] + moments + parts["overhead"]
        return max(sum(parts.values()), stepping)

    @property
    def on_host(self) -> int:
        """Bytes of the host's memory that this process's offloaded parts take."""
        moments = 2 * self.trained * EXACT // self.shards
        weights = (self.shape.parameters + self.trained) * EXACT // self.shards
        return {"none": 0, "optimizer": moments, "all": moments + weights}[self.offload]


def activation_bytes(shape: ModelShape, tokens: int, element: int, *, checkpointing: bool) -> int:
    """What the backward pass needs of the forward pass. Attention keeps no matrix of all pairs of tokens."""
    widths = 8 * shape.hidden + 3 * shape.attention + 4 * shape.key_value + 4 * shape.feed_forward
    # The two norms of a layer compute in float32.
    layer = tokens * (widths * element + 2 * shape.hidden * EXACT)
    if not checkpointing:
        return shape.layers * layer
    # Each layer's input, and one layer as a whole while it is computed again.
    return shape.layers * tokens * shape.hidden * element + layer


def choose_shard(load: UpdateLoad, *, nodes: int, per_node: int, available: int, host: int = 0) -> Shard:
    """What `trainer.shard=auto` means: the least sharding with which an update fits into `available` bytes a process, and what it
    offloads into `host` bytes of a node (0: not looked at).

    Whatever shards less sends less over the network. `per_node`: processes a node. Where nothing fits it is the way that needs
    least, "all". All processes must choose from the same numbers: the least memory of any, not each one's own.
    """
    for shard in ways(nodes, per_node):
        sharded = replace(load, shards=shards_of(shard, nodes, per_node))
        if sharded.total <= available and (not host or sharded.on_host * per_node <= host):
            return shard
    return ways(nodes, per_node)[-1]


def ways(nodes: int, per_node: int) -> tuple[Shard, ...]:
    """The ways to shard that differ, the least sharded first: within a node only where it has several processes, and over all
    only where there are several nodes."""
    node: tuple[Shard, ...] = ("node",) if per_node > 1 else ()
    return ("none", *node, *(("all",) if nodes > 1 else ()))


def shards_of(shard: Shard, nodes: int, per_node: int) -> int:
    """Over how many processes one copy of the model is sharded."""
    return {"none": 1, "node": per_node, "all": nodes * per_node}[shard]
