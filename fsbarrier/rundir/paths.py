"""Every name under the run directory. No other module spells one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

SPLITS = ("train", "test")


@dataclass(frozen=True)
class RunPaths:
    """The names below one run directory, `root`; nothing here touches the disk."""

    root: Path

    @property
    def record(self) -> Path:
        """Who made this run, and its resolved settings."""
        return self.root / "run.json"

    @cached_property
    def coordination(self) -> Path:
        """The protocol's own files (docs/protocol.md)."""
        return self.root / "coordination"

    @cached_property
    def joins(self) -> Path:
        """One immutable record an incarnation of a node."""
        return self.coordination / "joins"

    def join(self, rank: int, incarnation: int) -> Path:
        return self.joins / _start(rank, incarnation)

    @cached_property
    def beats(self) -> Path:
        """One heartbeat file an incarnation of a node, replaced as a whole at each beat."""
        return self.coordination / "beats"

    def beat(self, rank: int, incarnation: int) -> Path:
        return self.beats / _start(rank, incarnation)

    @cached_property
    def generations(self) -> Path:
        """The log of generations: one record a number, created exclusively."""
        return self.coordination / "generations"

    def generation(self, number: int) -> Path:
        return self.generations / f"gen-{number:06d}.json"

    @cached_property
    def stops(self) -> Path:
        """Requests to stop, written by `fsbarrier stop`."""
        return self.coordination / "stops"

    def filesystem(self, rank: int) -> Path:
        """What a node found out about the filesystem at its last start."""
        return self.coordination / "filesystem" / f"node-{rank:04d}.json"

    def facts_of(self, generation: int) -> Path:
        return self.coordination / f"gen-{generation:06d}"

    def iteration(self, generation: int, iteration: int) -> Path:
        return self.coordination / _iteration(generation, iteration)

    def phase(self, generation: int, iteration: int, index: int, name: str) -> Path:
        return self.coordination / _row(generation, iteration, index, name)

    def claims(self, generation: int, iteration: int, split: str) -> Path:
        """Who rolls out what, settled while it happens (fsbarrier/rollouts/claims.py), and how far all are."""
        return self.coordination / f"{_iteration(generation, iteration)}/claims-{split}"

    def trajectories(self, split: str) -> Path:
        return self.root / f"{split}_trajectories"

    def merged(self, split: str, iteration: int) -> Path:
        """The merged file of one iteration: {"trajectories": [...], "metadata": {...}}."""
        return self.root / _merged(split, iteration)

    def merged_by(self, split: str, iteration: int, generation: int) -> Path:
        """The same as one generation made it: no other one, woken up late, can put its own in its place."""
        return self.root / f"{_merged(split, iteration)}.g{generation:04d}"

    def rank_checkpoint(self, split: str, iteration: int, rank: int) -> Path:
        """What one node rank rolled out, finished."""
        return self.root / _rank_checkpoint(split, iteration, rank)

    def part(self, split: str, iteration: int, rank: int, generation: int, incarnation: int) -> Path:
        """A growing, crash-safe part of a rank's checkpoint; one writer, one generation."""
        final = _rank_checkpoint(split, iteration, rank)
        return self.root / f"{final}.g{generation:04d}i{incarnation:04d}.part"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, policy_version: int, generation: int) -> Path:
        """One policy version: `model/` (Hugging Face), `trainer/` (resumable state), MANIFEST.json."""
        return self.checkpoints / f"policy-{policy_version:06d}.g{generation:04d}"

    def batch(self, iteration: int, generation: int) -> Path:
        return self.checkpoints / "batches" / f"batch-{iteration:06d}.g{generation:04d}.pt"

    @property
    def served_model(self) -> Path:
        """What vLLM serves now: a link to (or a copy of) a Hugging Face model folder."""
        return self.root / "model.pt"

    @property
    def demo(self) -> Path:
        """The built-in task and its tiny model, where the run has no data of its own."""
        return self.root / "demo"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def node_logs(self, attempt: int, rank: int) -> Path:
        """The logs of one start (`attempt`, the node's incarnation) of one node."""
        return self.logs / f"attempt_{attempt}" / f"node_{rank}"

    @property
    def events(self) -> Path:
        return self.root / "events"

    def journal(self, rank: int, incarnation: int) -> Path:
        """The event journal of one incarnation; one writer a file."""
        return self.events / f"node_{rank}.inc-{incarnation:04d}.jsonl"


# --- names that are parts of others ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _start(rank: int, incarnation: int) -> str:
    return f"node-{rank:04d}.inc-{incarnation:04d}.json"


@lru_cache(maxsize=64)
def _iteration(generation: int, iteration: int) -> str:
    return f"gen-{generation:06d}/iter-{iteration:06d}"


@lru_cache(maxsize=1024)
def _row(generation: int, iteration: int, index: int, name: str) -> str:
    return f"{_iteration(generation, iteration)}/p{index:02d}-{name}"


def _merged(split: str, iteration: int) -> str:
    return f"{split}_trajectories/{split}_trajectories.pt.iteration{iteration}"


def _rank_checkpoint(split: str, iteration: int, rank: int) -> str:
    return f"{_merged(split, iteration)}_rank_{rank}.checkpoint"
