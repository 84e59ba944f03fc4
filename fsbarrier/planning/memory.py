"""Estimates the memory of one process of an update, and finds a sharding that fits. Pure.

The real memory also depends on kernels and on fragmentation; the journal shows the real peak of each update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings.sections import Settings
from fsbarrier.store.reading import GIB

Sharding = Literal["none", "node", "all"]
Offload = Literal["none", "optimizer", "all"]

# The context, the communication buffers and the gaps of the allocator on each accelerator.
OVERHEAD_BYTES = 2 * GIB
# Master weights, gradients and each of the two moments are in float32.
EXACT = 4
# Two float32 copies: the logits and their gradient.
LOGITS_COPIES = 2
# Memory limit of a micro-batch's logits; larger ones are computed in slices.
LOGITS_BYTES = 512 << 20
# A sharded update holds two units at a time in the compute dtype, one of them fetched ahead, and the gradient of one unit in the
# compute dtype and in float32.
UNITS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class UpdateLoad:
    """One process's part of an update. `shards`: over how many processes one copy of the model is split.

    `element`: bytes per element of the compute dtype. `tokens`: tokens of one micro-batch, padding included. `logits`: the number
    of positions whose logits are in memory at once. `reference`: whether a reference policy is read. `critic`: the model that is trained
    beside the policy. `zero_stage`: DeepSpeed's stage, None without it; `shards` is then the number of all processes.
    """

    shape: ModelShape
    shards: int
    element: int
    tokens: int
    logits: int
    checkpointing: bool = False
    offload: Offload = "none"
    reference: bool = False
    zero_stage: int | None = None
    # The part of the model that is not trained although there are no adapters (`trainer.freeze`).
    frozen: int = 0
    critic: ModelShape | None = None

    @classmethod
    def whole(cls, shape: ModelShape, settings: Settings, *, element: int, accelerated: bool) -> Self:
        """The load of one process without sharding, for these settings."""
        trainer = settings.trainer
        # A trajectory that is longer than a micro-batch is alone in it.
        tokens = max(settings.engine.max_model_len, trainer.max_tokens_per_micro_batch)
        checkpointing = trainer.gradient_checkpointing
        return cls(
            shape,
            shards=1,
            element=element,
            tokens=tokens,
            logits=min(tokens, LOGITS_BYTES // (LOGITS_COPIES * EXACT * shape.vocabulary)),
            checkpointing=accelerated if checkpointing is None else checkpointing,
            offload=trainer.offload,
            reference=settings.algorithm.kl_coef > 0 or settings.algorithm.kl_in_reward > 0,
            zero_stage=trainer.zero_stage if trainer.backend == "deepspeed" else None,
            frozen=shape.vision if trainer.freeze == "vision" and not settings.lora.rank else 0,
            critic=shape.as_critic if settings.algorithm.has_critic else None,
        )

    @property
    def trained(self) -> int:
        return self.shape.trained - self.frozen

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes on the accelerator at the peak, by part."""
        moments = self._moments() if self.critic is None else self._moments_of_two()
        return max(moments, key=lambda parts: sum(parts.values()))

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def _idle(self) -> dict[str, int]:
        """The parts that stay in memory while the other model (policy or critic) computes."""
        return {**self._held(), "gathered": 0, "gradients": 0}

    @property
    def _critic(self) -> UpdateLoad | None:
        """The critic's own load. Its head has one output, and it has no reference model."""
        if self.critic is None:
            return None
        return replace(self, shape=self.critic, critic=None, logits=0, reference=False, frozen=0)

    def _moments_of_two(self) -> Iterator[Mapping[str, int]]:
        """The parts while the policy computes, and while the critic computes."""
        critic = self._critic
        assert critic is not None
        for parts in self._moments():
            yield {**parts, "critic": sum(critic._idle.values())}
        for parts in critic._moments():
            own = sum(parts.get(name, 0) for name in critic._held())
            yield {**self._idle, **{n: parts[n] for n in parts.keys() - critic._held().keys()}, "critic": own}

    def _moments(self) -> Iterator[Mapping[str, int]]:
        held = self._held()
        logits = self.logits * self.shape.vocabulary * EXACT * LOGITS_COPIES
        computing = {"logits": logits, "overhead": OVERHEAD_BYTES}
        # The backward pass of a micro-batch.
        yield {
            **held,
            "activations": activation_bytes(
                self.shape, self.tokens, self.element, checkpointing=self.checkpointing
            ),
            **computing,
        }
        if self.offload == "optimizer" and self.zero_stage is None:
            # PyTorch's optimizer steps on the accelerator, which then holds all moments, and nothing of the backward pass any more.
            moments = 2 * self.trained * EXACT // self.shards
            yield {**held, "gathered": 0, "moments": moments, "overhead": OVERHEAD_BYTES}
        if self.reference:
            # Before the first step the reference policy is loaded, read without gradients, and freed.
            activations = layer_bytes(self.shape, self.tokens, self.element)
            yield {**held, "gradients": 0, **self._reference_parts(), "activations": activations, **computing}

    def _held(self) -> dict[str, int]:
        """The parts that one process holds of the policy and its optimizer while it computes. Nothing is gathered if each process has a
        whole copy in the compute dtype. DeepSpeed's stage 3 shards like `trainer.shard=all`; its own buffers are not counted."""
        shape, shards, everything = self.shape, self.shards, self.shape.trained == self.shape.parameters
        # With adapters the base model has no float32 master weights.
        base = EXACT if everything else self.element
        sharded = (shape.parameters * base + (not everything) * self.trained * EXACT) // shards
        moments = 2 * self.trained * EXACT // shards if self.offload == "none" else 0
        if self.zero_stage in (1, 2):
            # Each process computes with a whole copy; only the optimizer's weights and moments are sharded.
            master, copy = sharded if self.offload == "none" else 0, shape.parameters * self.element
            gradients = shape.parameters * EXACT
            return {"weights": copy + master, "gathered": 0, "gradients": gradients, "moments": moments}
        away = self.offload == "all"
        gathered = 0
        if shards > 1 or self.element < base or away:
            gathered = shape.largest_unit * (UNITS_AHEAD * self.element + everything * (self.element + EXACT))
            # The vision encoder is in the outermost unit, which stays gathered while the others come and go.
            gathered += shape.vision * self.element
        return {
            "weights": 0 if away else sharded,
            "gathered": gathered,
            "gradients": 0 if away else self.trained * EXACT // shards,
            "moments": moments,
        }

    def _reference_parts(self) -> dict[str, int]:
        """The reference policy: a whole copy on each process in the compute dtype, or shards in float32 (log_prob_pass.py)."""
        if self.shards == 1:
            return {"reference": self.shape.parameters * self.element}
        gathered = UNITS_AHEAD * self.shape.largest_unit * self.element
        sharded = 0 if self.offload == "all" else self.shape.parameters * EXACT // self.shards
        return {"reference": sharded, "gathered": gathered}

    @property
    def on_host(self) -> int:
        """Bytes of the host's memory that this process's offloaded parts take."""
        if self.offload == "none":
            return 0
        critic = self._critic.on_host if self._critic is not None else 0
        moments = 2 * self.trained * EXACT // self.shards + critic
        if self.offload == "optimizer":
            # DeepSpeed's optimizer steps on the host, so its float32 weights and their gradients are there too.
            return moments if self.zero_stage is None else 2 * moments
        reference = self.shape.parameters * EXACT if self.reference and self.shards > 1 else 0
        weights = (self.shape.parameters + self.trained) * EXACT
        return moments + (weights + reference) // self.shards


def activation_bytes(shape: ModelShape, tokens: int, element: int, *, checkpointing: bool) -> int:
    """Bytes that the forward pass keeps for the backward pass. Attention keeps no matrix of all pairs of tokens."""
    layer = layer_bytes(shape, tokens, element)
    if not checkpointing:
        return shape.layers * layer
    # Each layer's input, and one layer as a whole while it is computed again.
    return shape.layers * tokens * shape.hidden * element + layer


def layer_bytes(shape: ModelShape, tokens: int, element: int) -> int:
    """Bytes of the activations of one layer."""
    # The two norms of a layer compute in float32.
    return tokens * (shape.width * element + 2 * shape.hidden * EXACT)


def choose_sharding(load: UpdateLoad, *, nodes: int, per_node: int, available: int) -> Sharding:
    """Choose for `trainer.shard=auto`: the least sharding with which an update fits into `available` bytes a process.

    Less sharding means less network traffic. `per_node`: processes per node. If nothing fits, choose the sharding that needs the least
    memory. All processes must choose from the same number: the smallest memory of any process, not each one's own.
    """
    for shard in ways(nodes, per_node):
        if replace(load, shards=shards_of(shard, nodes, per_node)).total <= available:
            return shard
    return ways(nodes, per_node)[-1]


def ways(nodes: int, per_node: int) -> tuple[Sharding, ...]:
    """The distinct ways to shard, the least sharding first: "node" only if a node has several processes, and "all" only if there are
    several nodes."""
    node: tuple[Sharding, ...] = ("node",) if per_node > 1 else ()
    return ("none", *node, *(("all",) if nodes > 1 else ()))


def shards_of(shard: Sharding, nodes: int, per_node: int) -> int:
    """Over how many processes one copy of the model is sharded."""
    return {"none": 1, "node": per_node, "all": nodes * per_node}[shard]
