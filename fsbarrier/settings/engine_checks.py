"""Checks of two kinds of engines that cannot do everything: those over several nodes, and those that serve adapters. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsbarrier.settings.placement import Ranges
from fsbarrier.settings.without_effect import AsChosen
from fsbarrier.wording import counted

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

#: the largest rank of adapters that vLLM serves beside a model
MAX_RANK = 512


def served_adapters(s: Settings, named: AsChosen) -> Iterator[str]:
    """What vLLM cannot serve beside a model, or this project does not."""
    if s.lora.serve != "adapter":
        return
    serve, merged = named("lora.serve"), "use lora.serve=merged"
    if s.lora.rank > MAX_RANK:
        yield f"{named('lora.rank')}: with {serve} vLLM serves adapters of rank {MAX_RANK} at most; {merged}"
    if any(target.endswith("lm_head") for target in s.lora.targets):
        yield f"{named('lora.targets')}: with {serve} vLLM ignores adapters of the output head; {merged}"
    if s.engine.nodes > 1:
        yield f"{named('engine.nodes')}: an engine over several nodes serves merged weights only; {merged}"
    if not s.manages_engine:
        yield f"{serve}: the server is not this run's; drop {'--debug-mode' if s.debug_mode else named('engine.url')}, or {merged}"
    if s.trainer.command is not None:
        yield f"{serve}: {named('trainer.command')} publishes no adapters that this run knows; {merged}"
    if s.rollout.in_flight:
        yield f"{named('rollout.in_flight')}: with {serve} running requests keep the adapters that they name; {merged}"


def spanning(s: Settings, named: AsChosen) -> Iterator[str]:
    """An engine over several nodes."""
    size, engine = named("engine.nodes"), s.engine
    if engine.nodes == 1:
        return
    if not s.manages_engine:
        yield f"{size}: the server is not this run's; drop {'--debug-mode' if s.debug_mode else named('engine.url')}"
    if engine.nodes > s.num_nodes:
        yield f"{size}: the run has only {counted(s.num_nodes, 'node')} ({named('num_nodes')})"
    placed = Ranges.parse(s.placement.rollout)
    if placed.nodes and sum(rank in placed for rank in range(s.num_nodes)) < engine.nodes:
        yield f"{size}: {named('placement.rollout')} has fewer nodes"
    if engine.tensor_parallel_size % engine.nodes:
        yield f"{named('engine.tensor_parallel_size')}: must be a multiple of {size}, which all have equally many of the accelerators"
    if engine.replicas > 1:
        yield f"{named('engine.replicas')}: an engine over several nodes is the only one on each; drop it"
    if s.checkpoint.weights_dir not in ("auto", "none"):
        yield f"{named('checkpoint.weights_dir')}: {size} has all of an engine's nodes read the run directory; drop it"
