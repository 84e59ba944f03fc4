"""Shards the policy over the processes of an update: not at all, within each node, or over all processes (`trainer.shard`).

Uses PyTorch's fully_shard. A *unit* is gathered for computing and freed again: each transformer block, the embedding and the head. A unit's
shards, gradients and moments are in float32; it is gathered in the compute dtype, and gradients are reduced in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module

from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.planning.memory import Offload, Sharding, UpdateLoad, choose_sharding
from fsbarrier.settings.sections import TrainerSettings
from fsbarrier.training.policy import decoder_of
from fsbarrier.training.policy_model import TokenModel
from fsbarrier.training.processes import Processes


@dataclass(frozen=True, slots=True)
class Layout:
    """`shards`: number of processes that share one copy of the policy; 1: not sharded. `zero_stage`: DeepSpeed's ZeRO stage; stages 1 and 2
    shard only the optimizer state and gradients, not the policy."""

    shards: int
    offload: Offload
    zero_stage: int | None = None

    @property
    def has_it_whole(self) -> bool:
        """Whether each process holds all weights."""
        return self.shards == 1 or self.zero_stage in (1, 2)

    def described(self, processes: Processes) -> str:
        """Describe the layout for people."""
        copies, dtype = processes.world // self.shards, str(processes.dtype).removeprefix("torch.")
        how = f"replicated on {copies}" if self.shards == 1 else f"sharded over {self.shards}"
        if self.shards > 1 and copies > 1:
            how += f" of {processes.world}"
        if self.zero_stage is not None:
            how = f"DeepSpeed ZeRO-{self.zero_stage} on {processes.world}"
        offloaded = "" if self.offload == "none" else f", offload {self.offload}"
        return f"{how} process{'es' * (processes.world > 1)} ({dtype}{offloaded})"


def choose_layout(settings: TrainerSettings, processes: Processes, load: Callable[[], UpdateLoad]) -> Layout:
    """The layout for the settings on these processes. Raises UsageError if it is impossible."""
    wanted: Sharding = settings.shard if settings.shard != "auto" else _fitting(processes, load)
    by_node = processes.processes_by_node
    # The start of a session has refused this too (run/admission.py), but nodes may have left since.
    if wanted == "node" and len(set(by_node)) > 1:
        raise UsageError(
            f"trainer.shard=node: the nodes have different numbers of processes ({', '.join(map(str, by_node))}); "
            "set trainer.processes_per_node to the least of them, or trainer.shard=all"
        )
    shards = {"none": 1, "node": by_node[0], "all": processes.world}[wanted]
    return Layout(shards, settings.offload)


def _fitting(processes: Processes, load: Callable[[], UpdateLoad]) -> Sharding:
    """The least sharding that fits into memory. Nodes with different numbers of processes can only shard over all."""
    if processes.world == 1:
        return "none"
    by_node, available = processes.processes_by_node, processes.memory_bytes()
    if len(set(by_node)) > 1:
        return choose_sharding(load(), nodes=processes.world, per_node=1, available=available)
    return choose_sharding(load(), nodes=len(by_node), per_node=by_node[0], available=available)


def shard(model: TokenModel, layout: Layout, processes: Processes) -> None:
    """Shard `model` in place. Parameters on the "meta" device get uninitialised memory for their shards."""
    options: dict[str, Any] = {"mesh": mesh_of(layout, processes)}
    if processes.dtype is not torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=processes.dtype, reduce_dtype=torch.float32)
    if layout.offload == "all":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=processes.device.type == "cuda")
    inner = inner_units(model)
    for unit in inner:
        # The head is needed again right after the forward pass, so do not free it.
        fully_shard(unit, reshard_after_forward=unit is not model.head, **options)
    sharded = {parameter for unit in inner for parameter in unit.parameters()}
    # The output head belongs to two modules, of which one is a unit.
    fully_shard(model, ignored_params=sharded, **options)
    for unit in (*inner, model):
        # `fully_shard` has made each of these modules an FSDPModule.
        assert isinstance(unit, FSDPModule)
        # Sum gradients instead of averaging: each loss is already normalised over all processes' tokens.
        unit.set_gradient_divide_factor(1.0)
        # gloo supports only sum reductions.
        unit.set_force_sum_reduction_for_comms(True)
    # Every process must take part in every reduction, even for experts that its tokens did not use.
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(True)
    _materialise(model, torch.device("cpu") if layout.offload == "all" else processes.device)


def _materialise(model: TokenModel, device: torch.device) -> None:
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    embedding, head = model.causal.get_input_embeddings(), model.causal.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    buffers = [
        (module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()
    ]
    model.to_empty(device=device)
    # Put the buffers back, which `to_empty` replaced too: they had their content, on the right device.
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    if tied:
        head.weight = embedding.weight


def mesh_of(layout: Layout, processes: Processes) -> DeviceMesh:
    """The device mesh: one dimension for a single copy, else (copies, shards), where a node's processes share a copy."""
    copies, shards = processes.world // layout.shards, layout.shards
    if copies == 1:
        return init_device_mesh(processes.device.type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(processes.device.type, (copies, shards), mesh_dim_names=("replicate", "shard"))


def inner_units(model: TokenModel) -> list[Module]:
    """The inner units, innermost first. A tied head and its embedding stay together in the outermost unit, and so do frozen
    blocks outside the decoder: a micro-batch without images does not run them, and other processes must not wait for their gathering."""
    causal = model.causal
    names, decoder = set(causal._no_split_modules or ()), set(decoder_of(causal).modules())
    blocks = [
        module
        for module in causal.modules()
        if type(module).__name__ in names
        and (module in decoder or any(parameter.requires_grad for parameter in module.parameters()))
    ]
    if not blocks:
        raise ProgramFailed(
            f"{type(causal).__name__} does not declare its transformer blocks (_no_split_modules), so it cannot be sharded; "
            "set trainer.shard=none"
        )
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    if head is None:
        # A critic's head is small and stays in the outermost unit.
        return [*reversed(blocks), embedding]
    ends = [] if head.weight is embedding.weight else [embedding, model.head or head]
    return [*reversed(blocks), *ends]
