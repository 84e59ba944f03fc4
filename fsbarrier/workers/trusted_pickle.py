"""Converts a trusted trajectory file with pickled Python objects (from torch.save) to our format.

`python -m fsbarrier.workers.trusted_pickle SOURCE TARGET NODE_RANK`; started by `fsbarrier aggregate --trust-pickle`. Loading such a file
runs arbitrary code, so this is a separate process. Objects become dicts of their attributes, even if their class cannot be imported; a
trajectory that is a list of steps becomes a dict with `steps`.
"""

from __future__ import annotations

import json
import pickle
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fsbarrier.errors import FsbarrierError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.trajectories import ShardWriter

# Tasks of different ranks are always distinct: the original distributes the attempts at one task over the ranks.
RANK_STRIDE = 10**9
MAX_DEPTH = 100
TYPECODES = {torch.int32: "i", torch.float32: "f", torch.uint8: "B", torch.int64: "q", torch.float64: "d"}


class Unknown:
    """Placeholder for an object whose class is not installed; accepts any state."""

    def __new__(cls, *_: object, **__: object) -> Unknown:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass


class LenientUnpickler(pickle.Unpickler):
    """An unpickler that replaces classes that cannot be imported by subclasses of Unknown."""

    def find_class(self, module: str, name: str) -> object:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (Unknown,), {"__module__": module})


def main(words: list[str]) -> int:
    source, target, rank = Path(words[0]), Path(words[1]), int(words[2])
    try:
        shim = SimpleNamespace(Unpickler=LenientUnpickler, load=_load, __name__="pickle")
        loaded = torch.load(source, map_location="cpu", pickle_module=shim, weights_only=False)
        convert(loaded, target, rank)
    except FsbarrierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # The file's code may raise anything.
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


def _load(stream: Any, **options: Any) -> object:
    return LenientUnpickler(stream, **options).load()


def convert(loaded: object, target: Path, rank: int) -> None:
    """Write the loaded data as a finished rank file."""
    if not isinstance(loaded, dict) or not isinstance(loaded.get("trajectories"), list):
        raise ValueError('expected {"trajectories": [...], "metadata": {...}}')
    metadata = json.loads(json.dumps(plain(loaded.get("metadata") or {}), default=list))
    groups: dict[str, list[JsonObject]] = {}
    for number, item in enumerate(loaded["trajectories"]):
        # The original stores None for a task without a result.
        if item:
            record = trajectory(plain(item), rank, number)
            groups.setdefault(record["task_id"], []).append(record)
    indices = [rank * RANK_STRIDE + number for number in range(len(groups))]
    header = {"node_rank": rank, "assigned": indices, "original_metadata": metadata}
    with ShardWriter(target, prefix=f"trusted-{rank:04d}", header=header) as writer:
        for index, group in zip(indices, groups.values(), strict=True):
            for sample, record in enumerate(group):
                record.setdefault("sample", sample)
                record["task_index"] = index
            writer.append_group(index, group)
        writer.finish({})


def trajectory(item: object, rank: int, number: int) -> JsonObject:
    """One trajectory with the fields common to all trajectories."""
    record: JsonObject = dict(item) if isinstance(item, dict) else {"steps": item}
    steps = record.get("steps")
    last = steps[-1] if isinstance(steps, list) and steps and isinstance(steps[-1], dict) else {}
    reward = last.get("reward")
    if isinstance(reward, dict):
        reward = reward.get("reward")
    task = _task(steps[0]) if isinstance(steps, list) and steps else {}
    name = task.get("task_id") if task.get("task_id") is not None else task.get("task_name")
    record.setdefault("task_id", f"rank-{rank}-{number}" if name is None else name)
    record["task_id"] = str(record["task_id"])
    record.setdefault("reward", reward)
    record["reward"] = float(record["reward"]) if isinstance(record["reward"], int | float) else 0.0
    record.setdefault("policy_version", -1)
    record.setdefault("node_rank", rank)
    return record


def _task(step: object) -> dict[str, object]:
    observation = step.get("observation") if isinstance(step, dict) else None
    task = observation.get("task") if isinstance(observation, dict) else None
    return task if isinstance(task, dict) else {}


def plain(value: object, depth: int = 0) -> object:
    """`value` as plain values and flat arrays; other objects become their repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, bytes | bytearray):
        return array("B", value)
    if type(value).__module__ == "numpy":
        value = torch.as_tensor(value)
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    attributes = getattr(value, "__dict__", None)
    if attributes is None:
        return repr(value)
    fields = {str(name): plain(item, depth + 1) for name, item in attributes.items()}
    return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **fields}


def _plain_tensor(tensor: torch.Tensor) -> object:
    tensor = tensor.detach().cpu()
    if tensor.dim() == 0:
        return tensor.item()
    if tensor.dtype not in TYPECODES:
        tensor = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
    flat = array(TYPECODES[tensor.dtype])
    flat.frombytes(tensor.contiguous().view(-1).numpy().tobytes())
    return flat if tensor.dim() == 1 else {"shape": list(tensor.shape), "values": flat}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
