"""Keeps the trainer's state on the nodes between two versions that have it in the run directory, for processes that end after each update.

    FOLDER/policy-000006.g0004.state/trainer/    the parts that this node's processes hold, as in the run directory, and their layout
    FOLDER/policy-000006.g0004.state/state.json  which policy it belongs to, and which processes hold it

FOLDER is that of the node's copies of weights (weights_copy.py), and ends with the daemon. If the state is not there on every node, the
update loads the newest one of the run directory, and trains the batches since again (resume.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec

from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.limits import free_bytes
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.hashed_file import write_hashed
from fsbarrier.store import files, reading
from fsbarrier.training import safetensors_file
from fsbarrier.training.processes import Processes, gather_json
from fsbarrier.training.safetensors_file import StoredPart, StoredTensor
from fsbarrier.training.slices import LocalPart, Shares, local_part
from fsbarrier.training.trainer_state import LAYOUT, StateLayout, TrainerState
from fsbarrier.training.weights_copy import WeightsCopy

ABOUT = "state.json"


@dataclass(frozen=True, slots=True)
class LocalState:
    """The place of a node's states, and `settings`: what decides which process holds what."""

    place: WeightsCopy
    processes: Processes
    settings: JsonObject

    def has_room(self, state: TrainerState) -> bool:
        """Whether every node has room for its part. Every process must call this."""
        mine = sum(part.data.numel() * part.data.element_size() for part in self._parts(state).values())
        everyone = gather_json(mine)
        here = sum(everyone[rank] for rank in self.processes.on_this_node)
        return all(gather_json(free_bytes(self.place.folder) > here))

    def keep(self, version: str, policy: str, policy_version: int, state: TrainerState) -> None:
        """Write the state of a version that is committed, and remove that of others. A failure only means that it is not kept. Every
        process must call this."""
        folder, first = self.place.state(version), self.processes.speaks_for_its_node
        unfinished = folder.with_suffix(".unfinished")
        parts, failed = dict[str, StoredPart](), ""
        try:
            files.make_dirs(unfinished / "trainer")
            parts = self._write(unfinished / "trainer", self._parts(state))
        except OSError as error:
            failed = f"{unfinished}: {error.strerror or error}"
        everyone = gather_json((failed, msgspec.to_builtins(parts)))
        if not any(reason for reason, _ in everyone) and first:
            ours = [
                msgspec.convert(everyone[rank][1], dict[str, StoredPart])
                for rank in self.processes.on_this_node
            ]
            self._complete(unfinished, ours, policy, policy_version, state)
            # An earlier attempt at this version may have left a folder.
            files.discard(folder)
            unfinished.rename(folder)
        elif first:
            reason = next(reason for reason, _ in everyone if reason)
            print(f"{reason}: the trainer's state is not kept on the nodes", file=sys.stderr)
            files.discard(unfinished)
        if first:
            for other in self.place.folder.glob("*.state"):
                if other != folder:
                    files.discard(other)
        gather_json(None)

    def find(self, version: str, policy: str) -> Path | None:
        """The state of this policy, if every node has what its processes need. Every process must call this."""
        folder, usable = self.place.state(version), False
        if (folder / ABOUT).is_file():
            about = reading.json_object(folder / ABOUT, ProgramFailed)
            same = about["held_by"] == self._held_by() and about["settings"] == self.settings
            usable = about["policy"] == policy and (
                same or _is_complete(StateLayout.read(folder / "trainer"))
            )
        return folder / "trainer" if all(gather_json(usable)) else None

    def _held_by(self) -> JsonObject:
        here = self.processes.on_this_node
        return {"world": self.processes.world, "first": here.start, "count": len(here)}

    def _parts(self, state: TrainerState) -> dict[str, LocalPart]:
        """What this process writes: its part of each tensor, unless another process of this node writes the same."""
        here, shares, mine = self.processes.on_this_node, Shares(), dict[str, LocalPart]()
        for name, tensor in state.tensors.items():
            part = local_part(tensor, self.processes.rank, self.processes.world)
            # Every process holds what is not sharded.
            everywhere = part.replicas == self.processes.world
            writer = here[shares.next(len(here), tensor.numel())] if everywhere else self.processes.rank
            if writer == self.processes.rank and part.data.numel():
                mine[name] = part
        return mine

    def _write(self, folder: Path, parts: Mapping[str, LocalPart]) -> dict[str, StoredPart]:
        if not parts:
            return {}
        file = f"part-{self.processes.rank:05d}.safetensors"
        _, checks = safetensors_file.write(folder / file, {name: part.data for name, part in parts.items()})
        return {
            name: StoredPart(file, part.box.start, part.box.shape, tuple(checks[name]))
            for name, part in parts.items()
        }

    def _complete(
        self,
        folder: Path,
        parts: list[dict[str, StoredPart]],
        policy: str,
        policy_version: int,
        state: TrainerState,
    ) -> None:
        tensors = {name: StoredTensor(tuple(tensor.shape), []) for name, tensor in state.tensors.items()}
        for process in parts:
            for name, part in process.items():
                tensors[name].parts.append(part)
        layout = StateLayout(
            policy_version, state.optimizer_steps, state.scalars, tensors, state.kl_in_reward
        )
        digest = write_hashed(folder / "trainer" / LAYOUT, msgspec.json.encode(layout))
        about = {"policy": policy, "held_by": self._held_by(), "settings": self.settings}
        write_hashed(folder / ABOUT, json.dumps(about).encode())
        checkpoints.commit(folder, checkpoints.Manifest(policy_version, {f"trainer/{LAYOUT}": digest}))


def _is_complete(layout: StateLayout) -> bool:
    """Whether this node has all of every tensor, as without sharding and with trainer.shard=node."""
    return all(
        sum(prod(part.shape) for part in tensor.parts) == prod(tensor.shape)
        for tensor in layout.tensors.values()
    )
