"""Every path under the run directory. rundir/names.py has the names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path

from fsbarrier.protocol.facts import Pulse
from fsbarrier.rundir import names

# Unlike dataclasses.astuple, this copies nothing.
_PULSE_FIELDS = attrgetter(*(field.name for field in fields(Pulse)))


@dataclass(frozen=True)
class RunPaths:
    """The paths below the run directory `root`. Nothing here touches the disk."""

    root: Path

    @property
    def record(self) -> Path:
        """The run's record: its author, resolved settings, tasks and model (rundir/runrecord.py)."""
        return self.root / "run.json"

    # --- the protocol's own files (docs/protocol.md) ---

    @cached_property
    def coordination(self) -> Path:
        return self.root / "coordination"

    @cached_property
    def joins(self) -> Path:
        """One immutable record for each start (incarnation) of a node."""
        return self.coordination / "joins"

    def join(self, rank: int, incarnation: int) -> Path:
        return self.joins / names.START.build(rank, incarnation)

    @cached_property
    def beats(self) -> Path:
        """The heartbeats: one file for each start of a node, which is renamed at each beat."""
        return self.coordination / "beats"

    def pulse(self, pulse: Pulse) -> Path:
        return self.beats / names.PULSE.build(*_PULSE_FIELDS(pulse))

    @cached_property
    def status(self) -> Path:
        """The status of each start of a node: one file, which each heartbeat replaces."""
        return self.coordination / "status"

    def beat(self, rank: int, incarnation: int) -> Path:
        return self.status / names.START.build(rank, incarnation)

    @property
    def listed(self) -> tuple[Path, ...]:
        """The folders of the protocol that every node makes and lists."""
        return self.joins, self.beats, self.status, self.generations, self.stops

    @cached_property
    def generations(self) -> Path:
        """The log of generations: one record for each number, created exclusively."""
        return self.coordination / "generations"

    def generation(self, number: int) -> Path:
        return self.generations / names.GENERATION.build(number)

    @cached_property
    def stops(self) -> Path:
        """Requests to stop, written by `fsbarrier stop`."""
        return self.coordination / "stops"

    def stop(self, number: int) -> Path:
        return self.stops / names.STOP_REQUEST.build(number)

    def facts_of(self, generation: int) -> Path:
        return self.coordination / names.GENERATION_FOLDER.build(generation)

    @lru_cache(maxsize=64)  # noqa: B019
    def phase(self, generation: int, index: int, name: str) -> Path:
        """The folder of the facts about one row, of all iterations."""
        return self.facts_of(generation) / names.PHASE_FOLDER.build(index, name)

    def claims(self, generation: int, iteration: int, split: str) -> Path:
        """The nodes' claims on tasks and their progress during rollouts (rollouts/claims.py)."""
        return self.facts_of(generation) / names.CLAIMS_FOLDER.build(split, iteration)

    # --- trajectories ---

    def trajectories(self, split: str) -> Path:
        return self.root / names.TRAJECTORIES_FOLDER.build(split)

    def merged(self, split: str, iteration: int) -> Path:
        """The merged file of one iteration: {"trajectories": [...], "metadata": {...}}."""
        return self.trajectories(split) / names.MERGED.build(split, iteration)

    def merged_by(self, split: str, iteration: int, generation: int) -> Path:
        """Like `merged`, with the generation in the name, so that an older generation cannot replace the file."""
        return self.trajectories(split) / names.MERGED_BY.build(split, iteration, generation)

    def images(self, split: str, iteration: int) -> Path:
        """The images that the policy saw in one iteration, each under its SHA-256, for all nodes."""
        return self.trajectories(split) / names.IMAGES_FOLDER.build(split, iteration)

    def rank_checkpoint(self, split: str, iteration: int, rank: int) -> Path:
        """The finished rollouts of one node rank."""
        return self.trajectories(split) / names.RANK_CHECKPOINT.build(split, iteration, rank)

    def part(
        self,
        split: str,
        iteration: int,
        rank: int,
        generation: int,
        incarnation: int,
        policy_version: int = 0,
    ) -> Path:
        """A growing, crash-safe file of rollouts of one policy version, with one writer, in one generation."""
        made_by = generation, incarnation, policy_version
        return self.trajectories(split) / names.PART.build(split, iteration, rank, *made_by)

    # --- checkpoints, and what is served ---

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, policy_version: int, generation: int) -> Path:
        """One policy version: `model/` (Hugging Face), `trainer/` (resumable state), MANIFEST.json."""
        return self.checkpoints / names.POLICY_FOLDER.build(policy_version, generation)

    @property
    def batches(self) -> Path:
        return self.checkpoints / "batches"

    def batch(self, iteration: int, generation: int) -> Path:
        return self.batches / names.BATCH.build(iteration, generation)

    @property
    def served_model(self) -> Path:
        """The served policy: a link to a Hugging Face model folder."""
        return self.root / "model.pt"

    @property
    def first_policy(self) -> Path:
        """The run's copy of another run's policy version, with which it began (`init_from`): `model/`."""
        return self.root / "first_policy"

    @property
    def demo(self) -> Path:
        """The built-in task and its tiny model, for runs without data."""
        return self.root / "demo"

    # --- logs and events ---

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def node_logs(self, attempt: int, rank: int) -> Path:
        """The logs of one start (`attempt`, the node's incarnation) of one node."""
        return self.logs / names.ATTEMPT_FOLDER.build(attempt) / names.NODE_FOLDER.build(rank)

    @property
    def trackers(self) -> Path:
        """The trackers' files and positions, and the table of iterations."""
        return self.root / "trackers"

    @property
    def events(self) -> Path:
        return self.root / "events"

    def journal(self, rank: int, incarnation: int) -> Path:
        """The event journal of one incarnation, which has one writer."""
        return self.events / names.JOURNAL.build(rank, incarnation)
