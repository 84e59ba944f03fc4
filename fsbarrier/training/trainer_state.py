"""The trainer state: fp32 weights, the optimizer's moments, and the step count.

On disk it is the folder "trainer" of a policy version: safetensors files, and layout.json with the position of each part in its tensor. It
does not depend on the number of processes that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.training.optimizer import as_kept, in_eight_bits
from fsbarrier.training.processes import gather_json
from fsbarrier.training.slices import FlatPart
from fsbarrier.training.stored_tensors import StoredPart, StoredTensors

LAYOUT = "layout.json"
FORMAT = "fsbarrier-trainer/1"
# The state file of older versions of fsbarrier: a pickle.
OLD_STATE = "state.pt"
# Prefix of a parameter's own name; its moments have the optimizer's names as prefixes.
WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Pace:
    """Duration of the last save to the shared directory, and working time of updates since then."""

    saved_s: float = 0.0
    worked_s: float = 0.0


class Moments(Protocol):
    """An optimizer or an adapter for one: its state by parameter."""

    state: Any


@dataclass(frozen=True, slots=True)
class TrainerState:
    """One process's part. `tensors`: names like "exp_avg/model.norm.weight"; `scalars`: the optimizer's counters."""

    optimizer_steps: int
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, float]
    pace: Pace = field(default_factory=Pace)

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, Tensor],
        optimizer: Moments,
        optimizer_steps: int,
        *,
        without_weights: bool,
        pace: Pace | None = None,
    ) -> Self:
        """`parameters`: the trained parameters by name. `without_weights`: the served weights are already exact."""
        tensors = {} if without_weights else {f"{WEIGHT}/{name}": one for name, one in parameters.items()}
        scalars = {}
        for name, parameter in parameters.items():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, FlatPart) or (isinstance(value, Tensor) and value.dim()):
                    tensors[f"{key}/{name}"] = value
                else:
                    scalars[f"{key}/{name}"] = float(value)
        return cls(optimizer_steps, tensors, scalars, pace or Pace())


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The contents of layout.json."""

    policy_version: int
    optimizer_steps: int
    scalars: Mapping[str, float]
    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, list[StoredPart]]
    pace: Pace = field(default_factory=Pace)

    def encoded(self) -> bytes:
        tensors = {
            name: {"shape": shape, "parts": [part.as_json() for part in self.parts.get(name, ())]}
            for name, shape in self.shapes.items()
        }
        counts = {"policy_version": self.policy_version, "optimizer_steps": self.optimizer_steps}
        known = {"format": FORMAT, **counts, **asdict(self.pace)}
        return json.dumps({**known, "scalars": dict(self.scalars), "tensors": tensors}).encode()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ProgramFailed if it is missing, or differs from the policy version's manifest."""
        path = folder / LAYOUT
        if (folder / OLD_STATE).exists() and not path.exists():
            raise ProgramFailed(
                f"{folder / OLD_STATE} is a trainer state of an older version of fsbarrier, which is not supported: continue with that "
                "version, or start a new run from this policy's model folder (with a fresh optimizer)"
            )
        data = checkpoints.read_listed(folder.parent, f"{folder.name}/{LAYOUT}")
        try:
            found = json.loads(data)
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']}, this is for {FORMAT}")
            tensors = {str(name): tensor for name, tensor in found["tensors"].items()}
            parts = {name: [StoredPart.from_json(one) for one in tensors[name]["parts"]] for name in tensors}
            shapes = {name: tuple(int(size) for size in tensors[name]["shape"]) for name in tensors}
            scalars = {str(name): float(value) for name, value in found["scalars"].items()}
            pace = Pace(float(found["saved_s"]), float(found["worked_s"]))
            counts = int(found["policy_version"]), int(found["optimizer_steps"])
            return cls(*counts, scalars, shapes, parts, pace)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ProgramFailed(f"{path} is not a valid trainer state layout: {error}") from None


class StateGone(Exception):
    """No trainer state of this policy version is readable by all processes."""


def restore_first(
    folders: Sequence[Path],
    parameters: Mapping[str, Tensor],
    optimizer: Moments,
    policy_version: int,
) -> StateLayout:
    """Go on from the first of the folders from which all processes can; the last is in the shared directory, the others on nodes.

    Every process must call this. Raises StateGone where the last one's policy version was saved without a state, ProgramFailed where
    it has one that is damaged.
    """
    failed = ""
    for folder in folders:
        layout, failed = None, ""
        try:
            layout = restore(folder, parameters, optimizer, policy_version)
        except ProgramFailed as error:
            failed = str(error)
        failed = next(filter(None, gather_json(failed)), "")
        if layout is not None and not failed:
            return layout
    version = folders[-1].parent
    # Two hosts may see different listings, and all must go the same way.
    if any(gather_json(checkpoints.newest_state(version) != version.name)):
        raise StateGone
    raise ProgramFailed(failed)


def restore(
    folder: Path, parameters: Mapping[str, Tensor], optimizer: Moments, policy_version: int
) -> StateLayout:
    """Go on from a trainer state, whichever processes wrote it: this one reads its own parts.

    Raises ProgramFailed naming the file that is damaged, lacks something, or belongs to another version.
    """
    layout = StateLayout.read(folder)
    if layout.policy_version != policy_version:
        raise ProgramFailed(
            f"{folder}: cannot resume the trainer: this state belongs to policy version {layout.policy_version}, but the model is "
            f"version {policy_version}"
        )
    known = set(parameters)
    foreign = sorted({name.partition("/")[2] for name in (*layout.parts, *layout.scalars)} - known)
    if foreign:
        raise ProgramFailed(
            f"{folder}: contains {foreign[0]}, which is not a trained parameter of this model"
        )
    weights = {name: one for name, one in parameters.items() if f"{WEIGHT}/{name}" in layout.parts}
    if weights and len(weights) < len(parameters):
        lacking = min(known - set(weights))
        raise ProgramFailed(f"{folder}: cannot resume the trainer: the weights of {lacking} are missing")
    entries: dict[str, list[str]] = {name: [] for name in parameters}
    for one in (*layout.scalars, *layout.parts):
        entries[one.partition("/")[2]].append(one.partition("/")[0])
    with StoredTensors(folder, layout.shapes, layout.parts) as stored:
        for name, parameter in parameters.items():
            before = optimizer.state.get(parameter, {})
            state = {}
            for key in entries[name]:
                full, there = f"{key}/{name}", before.get(key)
                if key == WEIGHT:
                    stored.fill(full, parameter)
                elif full in layout.scalars:
                    device = there.device if isinstance(there, Tensor) else "cpu"
                    state[key] = torch.tensor(layout.scalars[full], dtype=torch.float32, device=device)
                else:
                    # Where the optimizer has a place for it already, maybe on another device, that is filled.
                    # A moment of eight bits cannot be filled in parts.
                    own = there is not None and not in_eight_bits(there)
                    filled = there if own else torch.empty_like(parameter, requires_grad=False)
                    stored.fill(full, filled)
                    state[key] = as_kept(optimizer, parameter, key, filled)
            if state:
                optimizer.state[parameter] = state
    return layout
