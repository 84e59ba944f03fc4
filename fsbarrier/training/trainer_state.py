"""Saves and restores the trainer state: fp32 weights, the optimizer's moments, and the step count.

On disk it is the folder "trainer" of a policy version: safetensors files, and layout.json with the position of each part in its tensor. It
does not depend on the number of processes that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.training.safetensors_file import StoredTensor, StoredTensors
from fsbarrier.training.slices import Partitioned

LAYOUT = "layout.json"
# The folder in a policy version with the critic's own `model` and `trainer`.
CRITIC = "critic"
# Prefix of a parameter's own name; its moments have the optimizer's names as prefixes.
WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """One process's part. `tensors`: names like "exp_avg/model.norm.weight"; `scalars`: the optimizer's counters; `kl_in_reward`: the
    current coefficient, which may adapt."""

    optimizer_steps: int
    tensors: Mapping[str, Tensor | Partitioned]
    scalars: Mapping[str, float]
    kl_in_reward: float | None = None

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer,
        optimizer_steps: int,
        *,
        without_weights: bool,
    ) -> Self:
        """`parameters`: the trained parameters by name. `without_weights`: the served weights are already exact."""
        tensors: dict[str, Tensor | Partitioned] = (
            {}
            if without_weights
            else {f"{WEIGHT}/{name}": parameter for name, parameter in parameters.items()}
        )
        scalars = {}
        for name, parameter in parameters.items():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor) and value.dim():
                    tensors[f"{key}/{name}"] = value
                else:
                    scalars[f"{key}/{name}"] = float(value)
        return cls(optimizer_steps, tensors, scalars)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The contents of layout.json."""

    policy_version: int
    optimizer_steps: int
    scalars: Mapping[str, float]
    tensors: Mapping[str, StoredTensor]
    kl_in_reward: float | None = None
    format: Literal["fsbarrier-trainer/1"] = "fsbarrier-trainer/1"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read layout.json. Raises ProgramFailed if it is missing, or differs from the policy version's manifest."""
        path = folder / LAYOUT
        version = folder.parent.parent if folder.parent.name == CRITIC else folder.parent
        data = checkpoints.read_listed(version, path.relative_to(version).as_posix())
        if data is None:
            raise ProgramFailed(f"{path} is not in the {checkpoints.MANIFEST} of its version")
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProgramFailed(f"{path} is not a valid trainer state layout: {error}") from None


def read_checked(folder: Path, trained: Set[str], policy_version: int) -> StateLayout:
    """Read a state's layout and check that it fits the parameters `trained`.

    Raises ProgramFailed naming what is missing, what is not a parameter, or the version that it belongs to.
    """
    layout = StateLayout.read(folder)
    if layout.policy_version != policy_version:
        raise ProgramFailed(
            f"{folder}: cannot resume the trainer: this state belongs to policy version {layout.policy_version}, but the model is "
            f"version {policy_version}"
        )
    foreign = sorted({name.partition("/")[2] for name in (*layout.tensors, *layout.scalars)} - trained)
    if foreign:
        raise ProgramFailed(
            f"{folder}: contains {foreign[0]}, which is not a trained parameter of this model"
        )
    lacking = sorted(name for name in trained if f"{WEIGHT}/{name}" not in layout.tensors)
    if lacking and len(lacking) < len(trained):
        raise ProgramFailed(f"{folder}: cannot resume the trainer: the weights of {lacking[0]} are missing")
    return layout


def restore(
    folder: Path, parameters: Mapping[str, Tensor], optimizer: Optimizer, policy_version: int
) -> StateLayout:
    """Restore a trainer state, whichever processes wrote it; each process reads its own parts.

    Raises ProgramFailed naming the file that is damaged, incomplete, or of another version.
    """
    layout = read_checked(folder, parameters.keys(), policy_version)
    for full, value in layout.scalars.items():
        key, _, name = full.partition("/")
        state = optimizer.state[parameters[name]]
        device = state[key].device if key in state else "cpu"
        state[key] = torch.tensor(value, dtype=torch.float32, device=device)
    with StoredTensors(folder, layout.tensors) as stored:
        for full in layout.tensors:
            key, _, name = full.partition("/")
            parameter = parameters[name]
            if key == WEIGHT:
                stored.fill(full, parameter)
                continue
            state = optimizer.state[parameter]
            # If the optimizer already holds this tensor, perhaps on another device, fill that.
            if key not in state:
                state[key] = torch.empty_like(parameter, requires_grad=False)
            stored.fill(full, state[key])
    return layout
