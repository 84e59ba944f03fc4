"""Writes a new policy version from all processes in parallel: each byte once, hashed while it is written.

    model/model-00001-of-00004.safetensors   whole layers in the serving precision; each file written by one process
    model/adapter/                           with LoRA: the adapters, in peft's format; then usually without the files of weights
    trainer/part-00003.safetensors           process 3's part of the fp32 weights and both moments
    trainer/layout.json                      the positions of those parts in the whole tensors
    critic/model, critic/trainer             the same of a critic, where the trainer state is saved
    logprobs.json                            what an engine must compute with these weights

Each process fsyncs its files, all exchange their results, and one writes the manifest.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsbarrier.engine.model import INDEX
from fsbarrier.errors import ProgramFailed, first_line
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir import checkpoints, known_logprobs
from fsbarrier.rundir.checkpoints import ADAPTER
from fsbarrier.rundir.hashed_file import FileDigest, copy_hashed, digest_of, write_hashed
from fsbarrier.rundir.known_logprobs import KnownLogprobs
from fsbarrier.store import files
from fsbarrier.training import safetensors_file
from fsbarrier.training.beside_weights import write_beside
from fsbarrier.training.delta_write import Against, is_worth_it
from fsbarrier.training.lora import Adapters
from fsbarrier.training.materialise import DELTA, README_NAME, readme
from fsbarrier.training.merge_adapters import CONFIG, WEIGHTS
from fsbarrier.training.processes import gather_json
from fsbarrier.training.safetensors_file import StoredPart, StoredTensor
from fsbarrier.training.slices import Partitioned, Shares, parts_to_write, whole_tensor
from fsbarrier.training.trainer_state import CRITIC, LAYOUT, StateLayout, TrainerState
from fsbarrier.training.weights_copy import WeightsCopy

T = TypeVar("T")

# Maximum size of a weight file, and the size below which files are not split just to give every process one.
LARGEST_FILE, SMALLEST_FILE = 5 << 30, 256 << 20
FOLDERS = ("model", "trainer", CRITIC, DELTA)


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """This node's local copy of the new weights for its engines; each process of the update writes some of the files.

    `ranks`: the ranks of this node's processes; the first one does the work that only one process may do.
    """

    place: WeightsCopy
    ranks: range

    def writer(self, number: int, owner: int) -> int:
        """The process of this node that copies file `number`: `owner`, which writes it to the shared directory, if it is on this node."""
        return owner if owner in self.ranks else self.ranks[number % len(self.ranks)]

    def write(self, version: str, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Write one file of the copy. A failure only means that there is no copy; the update continues."""
        path = self.place.unchecked(version) / file
        try:
            safetensors_file.write_unhashed(path, tensors)
        except OSError as error:
            print(f"{path}: {error.strerror or error}: no copy of the weights on this node", file=sys.stderr)
            self.place.give_up(version)


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A policy version to save, as every process passes it: tensors are DTensors, or plain tensors that all processes hold whole.

    `weights`: what is served, each tensor once, in the order of the layers; they are written in `dtype`, with `adapters` merged.
    `beside`: the folder whose tokenizer and other small files are copied; None: there are none.
    `trainer`: the state to save; None: none, and the manifest gets `state_in`. `copy`: where this node gets a copy of the weights, if there
    is room. `critic`: the critic, saved in its own folder. `known`: what an engine must compute with these weights, if that is known.
    `base`, `whole`: with adapters, the model that they belong to, and whether the merged weights are written too. `against`: the earlier
    version against which this one becomes a delta, unless the delta is too large; None: it is written whole.
    """

    policy_version: int
    model: PreTrainedModel
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    beside: Path | None
    trainer: TrainerState | None
    adapters: Adapters | None = None
    state_in: str | None = ""
    trained_since: tuple[str, ...] = ()
    copy: NodeCopy | None = None
    critic: NewVersion | None = None
    known: KnownLogprobs | None = None
    base: checkpoints.Base | None = None
    whole: bool = True
    against: Against | None = None

    @property
    def models(self) -> dict[str, NewVersion]:
        """The models to save, by the prefix of their files' names."""
        return {"": self} if self.critic is None else {"": self, f"{CRITIC}/": self.critic}

    def served(self, name: str) -> Tensor:
        """Gather a whole weight as it is served. Every process must call this in the same order."""
        weight = self.weights[name]
        merged = self.adapters.merged(name, weight) if self.adapters else weight
        return whole_tensor(merged, dtype_on_disk(weight, self.dtype))


@dataclass
class Written:
    """The files that one process wrote: digests by name in the folder, the file of each weight, the parts of the trainer's tensors. `made`:
    the files of weights that its deltas make."""

    digests: dict[str, FileDigest] = field(default_factory=dict)
    made: dict[str, FileDigest] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    parts: dict[str, StoredPart] = field(default_factory=dict)


def save(out: Path, version: NewVersion, rank: int, world: int) -> str:
    """Write a complete policy version to `out`; returns its manifest's digest.

    Every process must call this; all fail together. Raises ProgramFailed.
    """
    began = _together(out, lambda: _begin(out, version, rank))
    if version.copy is not None and not began[version.copy.ranks[0]]:
        version = replace(version, copy=None)
    models = version.models.items()
    sent = _together(
        out, lambda: [msgspec.to_builtins(_write(out / name, model, rank, world)) for name, model in models]
    )
    written = msgspec.convert(sent, list[list[Written]])
    if version.against is not None:
        version = _settle(out, version, version.against, written, rank)
    return _together(out, lambda: _commit(out, version, written) if rank == 0 else "")[0]


def _settle(
    out: Path, version: NewVersion, against: Against, written: list[list[Written]], rank: int
) -> NewVersion:
    """Decide by bytes whether the version stays a delta. Otherwise each process copies its files of weights from its node's copy."""
    copy, of_policy = version.copy, [of_process[0] for of_process in written]
    digests, made = dict[str, FileDigest](), dict[str, FileDigest]()
    for process in of_policy:
        digests |= process.digests
        made |= process.made
    worth_it = is_worth_it(digests, made)

    def publish_whole() -> JsonObject:
        copied = Written()
        if copy is not None and not worth_it:
            here = copy.place.unchecked(out.name).parent
            copied.digests = {name: copy_hashed(here / name, out / name) for name in of_policy[rank].made}
        return msgspec.to_builtins(copied)  # type: ignore[no-any-return]

    copied = msgspec.convert(_together(out, publish_whole), list[Written])
    if copy is not None and rank == copy.ranks[0]:
        # Nobody reads this node's copy of the version before: the engines have it in memory, and the new copy is newer.
        copy.place.discard(against.before.name)
    if worth_it:
        return version
    for process, whole in zip(of_policy, copied, strict=True):
        process.digests = {name: file for name, file in process.digests.items() if not name.startswith(DELTA)}
        process.digests |= whole.digests
        process.made = {}
    if rank == 0:
        files.discard(out / DELTA)
    return replace(version, against=None)


def _together(out: Path, act: Callable[[], T]) -> list[T]:
    """Run a step on every process and return all results, which are JSON data. If one process fails, all raise its ProgramFailed."""
    done: list[T] = []
    failed = ""
    try:
        done = [act()]
    except ProgramFailed as error:
        failed = str(error)
    except (OSError, RuntimeError, SafetensorError) as error:
        # Each library reports a full disk in a different way.
        failed = f"{out}: cannot save: {first_line(error)}"
    results = gather_json((failed, done))
    for reason, _ in results:
        if reason:
            raise ProgramFailed(reason)
    return [value for _, (value,) in results]


def _begin(out: Path, version: NewVersion, rank: int) -> bool:
    """Prepare the output folders; returns whether this process has room for its node's copy of the weights."""
    if rank == 0:
        if (out / checkpoints.MANIFEST).exists():
            raise ProgramFailed(f"{out} is already a complete policy version; nothing was written")
        _make_empty(out)
    if not version.whole or version.copy is None or rank != version.copy.ranks[0]:
        return False
    size = sum(sizes_on_disk(version.weights, version.dtype).values())
    before = version.against.before.name if version.against is not None else ""
    return version.copy.place.begin(out.name, size, keep=before)


def _make_empty(folder: Path) -> None:
    """Remove the files of an attempt that ended before its manifest."""
    for leftover in FOLDERS:
        files.discard(folder / leftover)
    for name in (checkpoints.MANIFEST, known_logprobs.NAME, README_NAME):
        (folder / name).unlink(missing_ok=True)
    files.make_dirs(folder)


def _write(out: Path, version: NewVersion, rank: int, world: int) -> Written:
    written = Written()
    files.make_dirs(out / "model")
    if version.whole:
        _write_weights(out, version, rank, world, written)
    if version.adapters is not None:
        _write_adapters(out / "model" / ADAPTER, version.model, version.adapters, rank, written)
    if rank == 0:
        beside = write_beside(out, version.beside, version.model.config, version.dtype)
        written.digests |= {f"model/{name}": digest for name, digest in beside.items()}
    files.fsync_dir(out / "model")
    if written.made:
        files.fsync_dir(out / DELTA)
    if version.trainer is not None:
        files.make_dirs(out / "trainer")
        _write_part(out / "trainer", version.trainer, rank, world, written)
        files.fsync_dir(out / "trainer")
    return written


def _write_weights(out: Path, version: NewVersion, rank: int, world: int, written: Written) -> None:
    """Gather every weight in turn on all processes; the process that writes a weight's file keeps the weight until the file is complete."""
    planned = plan_files(sizes_on_disk(version.weights, version.dtype), world)
    copy = version.copy
    mine: dict[str, dict[str, Tensor]] = {}
    for number, (owner, file, names) in enumerate(planned):
        kept = rank in (owner, copy and copy.writer(number, owner))
        for name in names:
            whole = version.served(name)
            if kept:
                tensor = whole.to("cpu", copy=True) if whole.device.type != "cpu" else whole
                mine.setdefault(file, {})[name] = tensor
    for owner, file, _ in planned:
        if file not in mine:
            continue
        # For some architectures transformers renames or merges tensors on loading; revert that.
        stored = revert_weight_conversion(version.model, mine.pop(file))
        if copy is not None:
            copy.write(out.name, file, stored)
        if owner == rank:
            written.weights |= dict.fromkeys(stored, file)
            against = version.against if copy is not None else None
            delta = against.write(copy.place, out, file) if copy is not None and against is not None else None
            if delta is not None:
                written.digests[f"{DELTA}/{file}.delta"] = delta.delta
                written.made[f"model/{file}"] = delta.made
                continue
            path = out / "model" / file
            written.digests[f"model/{file}"], _ = safetensors_file.write(path, stored)


def _write_adapters(
    folder: Path, model: PreTrainedModel, adapters: Adapters, rank: int, written: Written
) -> None:
    tensors = {
        name: whole_tensor(tensor, torch.float32).cpu() for name, tensor in adapters.stored(model).items()
    }
    if rank == 0:
        files.make_dirs(folder)
        written.digests[f"model/{ADAPTER}/{WEIGHTS}"], _ = safetensors_file.write(folder / WEIGHTS, tensors)
        adapters.config.save_pretrained(folder)
        written.digests[f"model/{ADAPTER}/{CONFIG}"] = digest_of(folder / CONFIG)
        files.fsync_dir(folder)


def sizes_on_disk(weights: Mapping[str, Tensor | Partitioned], dtype: torch.dtype) -> dict[str, int]:
    """The size of each weight on disk, in bytes."""
    return {name: weight.numel() * dtype_on_disk(weight, dtype).itemsize for name, weight in weights.items()}


def dtype_on_disk(weight: Tensor | Partitioned, dtype: torch.dtype) -> torch.dtype:
    """Parameters get the dtype of the served weights. Buffers keep their own: a router's bias in bfloat16 would choose other experts than
    the trainer does."""
    trained = isinstance(weight, (Parameter, Partitioned)) and weight.is_floating_point()
    return dtype if trained else weight.dtype


def plan_files(sizes: Mapping[str, int], world: int) -> list[tuple[int, str, list[str]]]:
    """The weight files in layer order: (writing process, file name, tensors). A layer is never split over two files."""
    limit = min(LARGEST_FILE, max(SMALLEST_FILE, sum(sizes.values()) // world))
    contents: list[list[str]] = []
    filled = 0
    for _, layer in groupby(sizes, key=_layer):
        names = list(layer)
        size = sum(sizes[name] for name in names)
        if not contents or filled + size > limit:
            contents.append([])
            filled = 0
        contents[-1] += names
        filled += size
    shares, count, planned = Shares(), len(contents), []
    for number, names in enumerate(contents, start=1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        planned.append((shares.next(world, sum(sizes[name] for name in names)), file, names))
    return planned


def _layer(name: str) -> str:
    """The unit that must stay in one file: the weight's transformer block, else the weight itself."""
    block = re.match(r".*?\.\d+\.", name)
    return block.group() if block else name


def _write_part(folder: Path, state: TrainerState, rank: int, world: int, written: Written) -> None:
    mine = parts_to_write(state.tensors, rank, world)
    if not mine:
        return
    file = f"part-{rank:05d}.safetensors"
    data = {name: part.data for name, part in mine.items()}
    written.digests[f"trainer/{file}"], checks = safetensors_file.write(folder / file, data)
    written.parts = {
        name: StoredPart(file, part.box.start, part.box.shape, tuple(checks[name]))
        for name, part in mine.items()
    }


def _write_layout(
    path: Path, state: TrainerState, policy_version: int, written: Iterable[Written]
) -> FileDigest:
    tensors = {name: StoredTensor(tuple(tensor.shape), []) for name, tensor in state.tensors.items()}
    for process in written:
        for name, part in process.parts.items():
            tensors[name].parts.append(part)
    layout = StateLayout(policy_version, state.optimizer_steps, state.scalars, tensors, state.kl_in_reward)
    return write_hashed(path, msgspec.json.encode(layout))


def _commit(out: Path, version: NewVersion, written: Sequence[Sequence[Written]]) -> str:
    """Complete each model, and write last the manifest with the files of all processes; returns its digest."""
    digests: dict[str, FileDigest] = {}
    for (prefix, model), of_all in zip(version.models.items(), zip(*written, strict=True), strict=True):
        completed = _complete(out / prefix, model, of_all)
        digests |= {prefix + name: digest for name, digest in completed.items()}
    if version.known is not None:
        digests[known_logprobs.NAME] = write_hashed(out / known_logprobs.NAME, version.known.encode())
    base = version.base
    if version.against is not None:
        base = version.against.base(
            {name: file for files_of in written for name, file in files_of[0].made.items()}
        )
    if base is not None and not any(map(checkpoints.is_weights, digests)):
        digests[README_NAME] = write_hashed(out / README_NAME, readme(out, version.policy_version, base))
    manifest = checkpoints.Manifest(
        version.policy_version, digests, version.state_in, version.trained_since, base
    )
    return checkpoints.commit(out, manifest).digest


def _complete(out: Path, version: NewVersion, written: Sequence[Written]) -> dict[str, FileDigest]:
    """Write the layout and the index of weights of a model; returns the files of all processes."""
    digests: dict[str, FileDigest] = {}
    weights: dict[str, str] = {}
    for process in written:
        digests |= process.digests
        weights |= process.weights
    if version.trainer is not None:
        layout = f"trainer/{LAYOUT}"
        digests[layout] = _write_layout(out / layout, version.trainer, version.policy_version, written)
    if not version.whole:
        return digests
    sizes = dict(digests)
    for process in written:
        sizes |= process.made
    total = sum(sizes[f"model/{file}"].size for file in set(weights.values()))
    return digests | write_index(out / "model", weights, total)


def write_index(model: Path, weights: Mapping[str, str], total: int) -> dict[str, FileDigest]:
    """Write the index of weights, if there are several files, of `total` bytes; returns the written file. Raises OSError."""
    if len(set(weights.values())) < 2:
        return {}
    index = {"metadata": {"total_size": total}, "weight_map": dict(weights)}
    return {f"model/{INDEX}": write_hashed(model / INDEX, json.dumps(index, indent=1).encode())}
