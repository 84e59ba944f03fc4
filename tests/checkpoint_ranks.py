"""Checkpoints written and read by 1 to 4 processes, sharded in every way; each process is forked, so that torch is imported once.

`python checkpoint_ranks.py FOLDER SEED reshard=4 kill=3 damage=20` fails where something is not to the last bit what it was.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.training import checkpoint_write, safetensors_file, trainer_state
from fsbarrier.training.checkpoint_write import NodeCopy
from fsbarrier.training.slices import local_part
from fsbarrier.training.weights_copy import WeightsCopy

STEPS = 2
# So that this small model has several files of weights and many blocks.
checkpoint_write.SMALLEST_FILE, safetensors_file.BLOCK_BYTES = 4096, 512


def in_ranks(world: int, store: Path, act: Callable[[int], None]) -> list[int]:
    """Run `act(rank)` in so many processes of one group; their exit statuses, as `os.waitpid` gives them."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                # Otherwise threads that load a model would be the first to find out that the fork's pool has no threads left, and race.
                torch.set_num_threads(1)
                files = torch.distributed.FileStore(str(store), world)
                torch.distributed.init_process_group("gloo", store=files, rank=rank, world_size=world)
                act(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    store.unlink(missing_ok=True)
    return ended


def model_of(seed: int) -> Qwen2ForCausalLM:
    """Sizes that no number of processes divides evenly."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 37, "hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False))


def shard(model: Qwen2ForCausalLM, mode: str, world: int, per_node: int = 0) -> None:
    if mode == "none":
        return
    per_node = per_node or (2 if world % 2 == 0 else 1)
    shape, names = {
        "all": ((world,), ("all",)),
        "node": ((world // per_node, per_node), ("nodes", "node")),
    }[mode]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, steps: Iterable[int] = range(STEPS)
) -> None:
    """Steps whose gradients are the same however the model is cut up; AdamW looks at each number alone."""
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            seeded = torch.Generator().manual_seed(1000 * step + number)
            whole = torch.randn(tuple(parameter.shape), generator=seeded)
            parameter.grad = like(parameter, whole)
        optimizer.step()


def like(target: Tensor, whole: Tensor) -> Tensor:
    part = local_part(target, 0, 1)
    mine = part.box.of(whole, (0,) * whole.dim())
    if not isinstance(target, DTensor):
        return mine
    return DTensor.from_local(
        *(mine, target.device_mesh, target.placements),
        shape=target.shape,
        stride=target.stride(),
    )


def trained(mode: str, world: int, steps: int = STEPS) -> tuple[Qwen2ForCausalLM, torch.optim.AdamW]:
    model = model_of(seed=0)
    shard(model, mode, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(steps))
    return model, optimizer


def save(
    out: Path,
    mode: str,
    rank: int,
    world: int,
    dtype: torch.dtype,
    beside: Path,
    copy: NodeCopy | None = None,
) -> None:
    model, optimizer = trained(mode, world)
    save_trained(out, model, optimizer, rank, world, dtype, beside, copy)


def save_trained(
    out: Path,
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.AdamW,
    rank: int,
    world: int,
    dtype: torch.dtype,
    beside: Path,
    copy: NodeCopy | None = None,
    steps: int = STEPS,
) -> None:
    parameters = dict(model.named_parameters())
    state = trainer_state.TrainerState.of(
        parameters, optimizer, steps, without_weights=dtype is torch.float32
    )
    new = checkpoint_write.NewVersion(
        *(1, model, model.state_dict(keep_vars=True), dtype, beside, state), copy=copy
    )
    checkpoint_write.save(out, new, rank, world)


def check_restored(folder: Path, mode: str, world: int) -> None:
    """What a process of another group reads is to the last bit what one process alone would have."""
    model = model_of(seed=99)
    shard(model, mode, world)
    restore_into(model, torch.optim.AdamW(model.parameters(), lr=0.1), folder, STEPS)


def restore_into(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.AdamW,
    folder: Path,
    steps: int,
) -> None:
    """Go on from what was saved after `steps`; it is to the last bit what one process alone would have."""
    expected_model, expected = trained("none", 1, steps)
    parameters = dict(model.named_parameters())
    served = {
        name: one
        for path in (folder / "model").glob("*.safetensors")
        for name, one in load_file(path).items()
    }
    for name, parameter in parameters.items():
        local(parameter).copy_(local(like(parameter, served[name])))
    found = trainer_state.restore(folder / "trainer", parameters, optimizer, 1)
    assert found.optimizer_steps == steps
    for name, one in expected_model.named_parameters():
        mine = parameters[name]
        assert torch.equal(local(mine), local(like(mine, one.detach()))), f"{name} differs"
        for key in ("exp_avg", "exp_avg_sq"):
            whole = expected.state[one][key]
            assert torch.equal(local(optimizer.state[mine][key]), local(like(mine, whole))), f"{key}/{name}"
        assert torch.equal(optimizer.state[mine]["step"], expected.state[one]["step"])


def local(tensor: Tensor) -> Tensor:
    return local_part(tensor, 0, 1).data


def check_files(folder: Path, dtype: torch.dtype) -> None:
    """transformers loads the model, every weight in `dtype`; the trainer's files have each number once."""
    checkpoints.verify(folder)
    expected, _ = trained("none", 1)
    served = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    assert served.config.dtype == dtype
    for (name, one), (other, whole) in zip(
        served.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(one, whole.to(dtype)), name
    numbers = sum(one.numel() for one in expected.parameters())
    kinds = 2 if dtype is torch.float32 else 3
    sizes = [path.stat().st_size for path in (folder / "trainer").glob("*.safetensors")]
    headers = [
        8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in (folder / "trainer").glob("*.safetensors")
    ]
    assert sum(sizes) - sum(headers) == 4 * kinds * numbers
    if len(sizes) > 1:
        assert max(sizes) < 3 * min(sizes), f"the processes wrote {sizes}"


def modes(world: int) -> list[str]:
    return ["none", "node", "all"] if world > 1 else ["none", "all"]


def beside_of(folder: Path) -> Path:
    beside = folder / "beside"
    beside.mkdir(exist_ok=True)
    (beside / "tokenizer.json").write_text("{}")
    (beside / "old.safetensors").write_text("weights of the policy before")
    return beside


def reshard(folder: Path, draw: random.Random, number: int) -> None:
    beside, out = beside_of(folder), folder / f"v{number}"
    before, after = draw.randint(1, 4), draw.randint(1, 4)
    mode, other = draw.choice(modes(before)), draw.choice(modes(after))
    dtype = draw.choice([torch.float32, torch.bfloat16])
    print(f"{number}: {mode} x {before} -> {other} x {after}, {dtype}", flush=True)
    store = folder / "store"
    wrote = in_ranks(before, store, lambda rank: save(out, mode, rank, before, dtype, beside))
    assert not any(wrote), wrote
    assert not (out / "model" / "old.safetensors").exists()
    read = in_ranks(
        after,
        store,
        lambda _: check_restored(out, other, after),
    )
    assert not any(read), read
    check_files(out, dtype)


def check_copy(place: WeightsCopy, out: Path) -> None:
    """What the node's processes left agrees with the manifest, in every byte and with nothing beside."""
    files = sorted(place.unchecked(out.name).iterdir())
    assert files and all(path.suffix == ".safetensors" for path in files), files
    assert place.confirm(out / "model", lambda: None) == ""
    here = place.checked(out.name)
    assert place.nearest(out / "model") == here
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        path.name: path.read_bytes() for path in (out / "model").iterdir()
    }
    assert [path.name for path in place.folder.iterdir()] == [out.name]


def kill(folder: Path, draw: random.Random, number: int) -> None:
    """SIGKILL of one process before its n-th call that changes the disk."""
    beside = beside_of(folder)
    world = draw.randint(1, 3)
    mode, victim = draw.choice(modes(world)), draw.randrange(world)
    out, told, place = folder / f"v{number}", folder / f"calls{number}", WeightsCopy(folder / "copies")
    place.folder.mkdir(exist_ok=True)

    def act(rank: int, dies_at: int) -> None:
        if rank == victim:
            count_calls(told, dies_at)
        save(out, mode, rank, world, torch.bfloat16, beside, copy=NodeCopy(place, range(world)))

    assert not any(in_ranks(world, folder / "store", lambda rank: act(rank, -1)))
    calls = int(told.read_text())
    shutil.rmtree(out)
    # The last calls are those around the manifest.
    dies_at = draw.choice([draw.randrange(calls), max(0, calls - 1 - draw.randrange(6))])
    print(f"{number}: {mode} x {world}, process {victim} dies at call {dies_at} of {calls}", flush=True)
    # A process makes a call or two less where another one made a folder before it.
    while not any(ended := in_ranks(world, folder / "store", lambda rank, n=dies_at: act(rank, n))):
        assert dies_at > calls - 9, f"{victim} makes {calls} calls, and does not come to number {dies_at}"
        shutil.rmtree(out)
        dies_at -= 1
    assert os.WTERMSIG(ended[victim]) == signal.SIGKILL, ended
    # What no manifest vouches for is never read.
    assert place.nearest(out / "model") == out / "model"
    if (out / checkpoints.MANIFEST).exists():
        check_files(out, torch.bfloat16)
        check_copy(place, out)
        shutil.rmtree(out)
    else:
        try:
            place.confirm(out / "model", lambda: None)
        except ProgramFailed as error:
            assert str(out) in str(error)
        else:
            raise AssertionError("a half-written version counts as complete")
    assert not any(
        in_ranks(
            world,
            folder / "store",
            lambda rank: act(rank, -1),
        )
    )
    check_files(out, torch.bfloat16)
    check_copy(place, out)


def die_at(module: ModuleType | type, name: str, when: str, call_number: int = 1) -> None:
    """End this process by SIGKILL where it calls a function, before or after that call."""
    real, calls = getattr(module, name), itertools.count(1)

    def call(*args: object, **kwargs: object) -> object:
        last = next(calls) == call_number
        if when == "after" or not last:
            result = real(*args, **kwargs)
            if not last:
                return result
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process lives on after SIGKILL")

    setattr(module, name, call)


def count_calls(told: Path, dies_at: int) -> None:
    """End this process by SIGKILL just before call number `dies_at` of those that change the disk; note how many there were."""
    made = 0
    for name in ("open", "write", "fsync", "replace", "mkdir"):
        real = getattr(os, name)

        def call(*args: object, _real: Callable[..., object] = real, **kwargs: object) -> object:
            nonlocal made
            if made == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            made += 1
            result = _real(*args, **kwargs)
            if dies_at < 0:
                told.write_text(str(made))
            return result

        setattr(os, name, call)


def damage(folder: Path, draw: random.Random, number: int) -> None:
    """A file that is cut off, changed in one bit, lost, another version's, or one too many is refused by name or was of no account.
    Another version beside it is as good as before."""
    beside, out, other = beside_of(folder), folder / "v1", folder / "v2"
    if not out.exists():
        for version, dtype in ((out, torch.bfloat16), (other, torch.float32)):
            wrote = in_ranks(
                *(3, folder / "store"),
                lambda rank, version=version, dtype=dtype: save(version, "all", rank, 3, dtype, beside),
            )
            assert not any(wrote), wrote
    path = draw.choice(sorted(one for one in out.rglob("*") if one.is_file()))
    whole = path.read_bytes()
    how, at = draw.choice(("cut", "changed", "lost", "exchanged", "added")), draw.randrange(len(whole))
    flipped = bytes([whole[at] ^ (1 << draw.randrange(8))])
    touched = path
    match how:
        case "cut":
            path.write_bytes(whole[:at])
        case "changed":
            path.write_bytes(whole[:at] + flipped + whole[at + 1 :])
        case "lost":
            path.unlink()
        case "exchanged":
            path.write_bytes((other / path.relative_to(out)).read_bytes())
        case "added":
            touched = path.with_name(f"added-{path.name}")
            touched.write_bytes(whole)
    print(f"{number}: {path.name}, {how} at {at} of {len(whole)}", flush=True)
    try:
        checkpoints.verify(out)
    except ProgramFailed as error:
        assert touched.name in str(error) or path.name == checkpoints.MANIFEST, error
    else:
        # Both versions have the same small files, and another manifest has to be one that says the same.
        # What no manifest lists is part of nothing.
        harmless = (
            how == "added" or (how == "exchanged" and touched.read_bytes() == whole) or touched.parent == out
        )
        assert harmless and (how in ("changed", "added") or touched.read_bytes() == whole), how
    if path.parent.name == "trainer":
        refuse_or_be_right(out, path)
    checkpoints.verify(other)
    if touched != path:
        touched.unlink()
    path.write_bytes(whole)


def refuse_or_be_right(out: Path, path: Path) -> None:
    try:
        restored_alone(out)
    except ProgramFailed as error:
        assert path.name in str(error) or str(path.parent) in str(error), error


def restored_alone(out: Path) -> None:
    torch.set_num_threads(1)
    model = model_of(seed=99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer_state.restore(out / "trainer", dict(model.named_parameters()), optimizer, 1)
    expected_model, expected = trained("none", 1)
    for one, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["exp_avg"], expected.state[other]["exp_avg"])
        assert torch.equal(optimizer.state[one]["exp_avg_sq"], expected.state[other]["exp_avg_sq"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, seed, *rounds = sys.argv[1:]
    rounds_of = {"reshard": reshard, "kill": kill, "damage": damage}
    for one in rounds:
        what, _, times = one.partition("=")
        folder = Path(where) / what
        folder.mkdir()
        draw = random.Random(int(seed))
        for number in range(int(times)):
            rounds_of[what](folder, draw, number)
