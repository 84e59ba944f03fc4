"""Does the update work on this accelerator, how fast, and in how much memory? Each way to run it on one card, with random weights.

`python scripts/gpu_check.py --size 7b --layers 8` makes a model of that shape and trains it for a few steps in each mode, with the code
that an update of a run uses. Every mode has a process of its own, and another one reads its checkpoint back. Without an accelerator a
tiny model goes through the same on the CPU.

It needs torch 2.11 or later, transformers 5 and safetensors, and nothing that they do not bring themselves: no vLLM, no network, no
run directory, and of fsbarrier this checkout. With peft it tries LoRA too, with flash-attn packed micro-batches.

The file is longer than others: who doubts a figure of the table finds in one place how it was taken.

Exit code 0: every mode worked, or did not fit into memory. 1: one failed for another reason. 2: bad flags.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings.sections import EngineSettings, LoraSettings, Settings, TrainerSettings
from fsbarrier.store.reading import GIB
from fsbarrier.training.architecture import measure
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.optimizer_step import train
from fsbarrier.training.policy import architecture
from fsbarrier.training.processes import Processes
from fsbarrier.training.slices import local_part
from fsbarrier.training.trainer import Trainer, update_load

# Qwen2.5's shapes and, as 8b, Llama 3.1's.
SIZE_NAMES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZE_NAMES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
SIZES = {
    "tiny": ("qwen2", 64, 128, 2, 4, 2, 512, True),
    "0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151_936, True),
    "1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 151_936, True),
    "3b": ("qwen2", 2048, 11_008, 36, 16, 2, 151_936, True),
    "7b": ("qwen2", 3584, 18_944, 28, 28, 4, 152_064, False),
    "8b": ("llama", 4096, 14_336, 32, 32, 8, 128_256, False),
}
# The makers' figures for dense bfloat16, in TFLOP/s, by words that are all in the card's name; the first that fits counts.
PEAKS = {"B200": 2250, "H200 NVL": 836, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835}
PEAKS |= {"H100": 989, "A100": 312, "A10": 125, "L40S": 362, "L4": 121, "MI300X": 1307}
# What a launcher tells its processes; each one here is alone.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
MEMORY_WORDS = ("out of memory", "can't allocate memory", "alloc_failed")
COLUMNS: tuple[str, ...] = ("tokens/s", "s/step", "MFU", "peak GiB", "reserved", "plan", "gradient")
COLUMNS += ("write MB/s", "read MB/s")

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Mode:
    """`needs`: a package without which it is not tried."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    lora_rank: int = 0
    needs: str = ""


# The first is what an update on an accelerator does unless it is told otherwise.
MODES = {
    "plain": Mode(),
    "no-checkpointing": Mode({"gradient_checkpointing": False}),
    "flash": Mode({"attention": "flash_attention_2"}, needs="flash_attn"),
    "offload-optimizer": Mode({"offload": "optimizer"}),
    "offload-all": Mode({"offload": "all"}),
    "lora": Mode(lora_rank=16, needs="peft"),
    "lora-offload-all": Mode({"offload": "all"}, lora_rank=16, needs="peft"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What training in one mode came to: its cells of the table, how long its checkpoint took (None: there is none), and `bits_of`."""

    cells: list[str]
    written_s: float | None
    bits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str
    memory: bool

    @classmethod
    def by(cls, error: Exception) -> Failed:
        first = (str(error).splitlines() or [""])[0] or type(error).__name__
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        return cls(first, known or any(words in str(error).lower() for words in MEMORY_WORDS))


def make_model(show: Show, folder: Path, options: argparse.Namespace) -> tuple[str]:
    """A model folder of the chosen shape, with random weights as transformers makes them; gives the machine's name."""
    kind, *sizes = SIZES[options.size]
    known = dict(zip(SIZE_NAMES, sizes, strict=True))
    known["num_hidden_layers"] = options.layers or known["num_hidden_layers"]
    show("making random weights")
    torch.manual_seed(0)
    on_card = torch.cuda.is_available()
    with torch.device("cuda" if on_card else "cpu"):
        config = transformers.AutoConfig.for_model(kind, **known)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return (torch.cuda.get_device_name() if on_card else "CPU",)


def settings_of(mode: Mode, options: argparse.Namespace) -> Settings:
    chosen: dict[str, Any] = {"shard": "none", "gradient_checkpointing": True, **mode.trainer}
    return replace(
        Settings(),
        trainer=replace(TrainerSettings(), max_tokens_per_micro_batch=4 * options.tokens, **chosen),
        lora=LoraSettings(rank=mode.lora_rank),
        engine=EngineSettings(max_model_len=options.tokens),
    )


def random_batch(vocabulary: int, options: argparse.Namespace) -> TrainingBatch:
    """Sequences of half to all of `--tokens`, of which the model sampled all but the first quarter."""
    count = options.steps * options.sequences
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(options.tokens // 2, options.tokens + 1, (count,), generator=random)
    # Each step begins with a micro-batch of the longest, which the plan reckons with.
    lengths.view(options.steps, -1)[:, :4] = options.tokens
    total = int(lengths.sum())
    return TrainingBatch(
        token_ids=torch.randint(0, vocabulary, (total,), generator=random, dtype=torch.int32),
        loss_mask=torch.cat([torch.arange(n) >= n // 4 for n in lengths.tolist()]).to(torch.uint8),
        logprobs=torch.full((total,), -math.log(vocabulary)),
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        weights=torch.tensor([1.0, -1.0]).repeat(count)[:count],
        # No engine sampled them, so there is nothing to compare the trainer's log-probabilities with.
        current=torch.zeros(count, dtype=torch.uint8),
        engines=torch.full((count, 2), -1, dtype=torch.int32),
        continues=torch.zeros(count, dtype=torch.uint8),
        groups=torch.zeros(count, dtype=torch.int32),
        steps=tuple(torch.arange(count).chunk(options.steps)),
    )


def train_mode(show: Show, mode: Mode, model: Path, out: Path, options: argparse.Namespace) -> Measured:
    """Train for the chosen number of steps, of which the first is not timed, and save."""
    settings, shape = settings_of(mode, options), measure(architecture(model))
    processes = Processes(settings.trainer)
    batch = random_batch(shape.vocabulary, options)
    rest = replace(batch, steps=batch.steps[1:])
    # Adapters begin at random.
    torch.manual_seed(0)
    show("loading")
    trainer = Trainer.load(processes, settings, model_folder=model, state_folder=None, policy_version=0)
    show(f"step 1 of {options.steps}")
    first = train(trainer, replace(batch, steps=batch.steps[:1]), settings, model)
    began = finished(processes)
    train(trainer, rest, settings, model, lambda done: show(f"step {done + 1} of {options.steps}"))
    seconds, written_s = finished(processes) - began, None
    needed = shape.parameters * (processes.serving_dtype.itemsize + (0 if mode.lora_rank else 12))
    if options.checkpoint and shutil.disk_usage(out.parent).free > needed:
        show("writing a checkpoint")
        began = time.perf_counter()
        trainer.save(out, model_folder=model, policy_version=1)
        written_s = time.perf_counter() - began
    lengths = batch.lengths()[options.sequences :]
    sampled = sum(int(batch.sampled_tokens(step).sum()) for step in rest.steps)
    used = flops(shape, lengths, sampled, lora=mode.lora_rank > 0) / seconds
    card = torch.cuda.get_device_name() if processes.device.type == "cuda" else ""
    peak = peak_of(card) if processes.dtype is torch.bfloat16 else None
    cells = [
        f"{sum(lengths) / seconds:,.0f}",
        f"{seconds / len(rest.steps):.3f}",
        f"{used / peak:.1%}" if peak else "-",
        f"{processes.peak_memory_bytes() / GIB:.2f}",
        f"{torch.cuda.max_memory_reserved() / GIB:.2f}" if card else "-",
        f"{update_load(model, settings, processes).total / GIB:.2f}",
        f"{first.grad_norm:.4g}",
    ]
    return Measured(cells, written_s, bits_of(trainer))


def read_mode(
    show: Show, mode: Mode, model: Path, out: Path, options: argparse.Namespace, bits: Mapping[str, int]
) -> tuple[int, float]:
    """(bytes, seconds) of going on from a checkpoint as the next update does, which reads it from the disk and not from the memory that
    it was written through. Raises RuntimeError where it is not what was trained."""
    settings = settings_of(mode, options)
    processes = Processes(settings.trainer)
    # Adapters are put into the first model again.
    weights, state = model if mode.lora_rank else out / "model", out / "trainer"
    paths = [path for folder in (weights, state) for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        with path.open("rb") as file, contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    show("reading the checkpoint")
    began = finished(processes)
    trainer = Trainer.load(processes, settings, model_folder=weights, state_folder=state, policy_version=1)
    seconds = finished(processes) - began
    found = bits_of(trainer)
    if wrong := [name for name in {**bits, **found} if found.get(name) != bits.get(name)]:
        raise RuntimeError(f"what was read back is not what was trained: {wrong[0]}")
    return sum(path.stat().st_size for path in paths), seconds


def finished(processes: Processes) -> float:
    """The time at which the accelerator has done all that it was asked for."""
    if processes.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bits_of(trainer: Trainer) -> dict[str, int]:
    """Of each tensor that a checkpoint must bring back: the sum of its bits, read as whole numbers."""
    state = trainer.backend.state(trainer.optimizer_steps, without_weights=False)
    parts = {name: local_part(one, rank=0, world=1).data for name, one in state.tensors.items()}
    return {name: int(one.view(torch.int32).sum(dtype=torch.int64)) for name, one in parts.items()}


def flops(shape: ModelShape, lengths: list[int], sampled: int, *, lora: bool) -> int:
    """What the model needs, however it is computed: nothing for what is computed twice, half of attention's square.

    A product forward is one of the same size backward to the inputs, and another one to the weights where they are trained.
    The head is only computed for the tokens that were sampled.
    """
    products = 2 * (shape.layers * shape.block * sum(lengths) + shape.embedding * sampled)
    attention = 2 * shape.layers * shape.attention * sum(length * length for length in lengths)
    return products * (2 if lora else 3) + attention * 3


def peak_of(card: str) -> float | None:
    """FLOP/s; None for a card that is not in the table."""
    words = set(re.findall(r"\w+", card))
    return next((peak * 1e12 for name, peak in PEAKS.items() if words.issuperset(name.split())), None)


def answer(pipe: Any, log: Path, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In a process of its own: send what `act` shows, and last what it gives, or why it failed. What libraries say goes to `log`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        pipe.send(act(pipe.send, *arguments))
    except Exception as error:
        traceback.print_exc()
        pipe.send(Failed.by(error))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class Runner:
    """Runs the modes one after the other, and prints a row of each; `broken`: one failed for another reason than memory."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.model, self.out, self.log = folder / "model", folder / "checkpoint", folder / "log"
        self.options = options
        # A forked process cannot use an accelerator that its parent has looked at; on a CPU it need not import torch again.
        self.context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        self.notes: list[str] = []
        self.broken = False
        #: what `--json` writes
        self.record: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}

    def run(self) -> None:
        options = self.options
        made = self.in_process("model", make_model, self.model, options)
        if isinstance(made, Failed):
            self.row("model", [self.failed("model", made)])
            return
        shape = measure(architecture(self.model))
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.record |= {"accelerator": made[0], **versions, "parameters": shape.parameters}
        print(f"{made[0]}; torch {torch.__version__}, transformers {transformers.__version__}")
        print(f"{options.size}: {shape.parameters / 1e6:,.1f} million parameters in {shape.layers} layers")
        print(f"{options.sequences} sequences of up to {options.tokens:,} tokens a step\n")
        row("mode", COLUMNS)
        for name in options.modes:
            mode = MODES[name]
            if mode.needs and find_spec(mode.needs) is None:
                self.row(name, [f"not tried: {mode.needs} is not installed"])
            elif mode.needs == "flash_attn" and not torch.cuda.is_available():
                self.row(name, ["not tried: it needs an accelerator"])
            else:
                self.row(name, self.cells(name, mode))

    def cells(self, name: str, mode: Mode) -> list[str]:
        """A mode's row."""
        # What a failed one left.
        shutil.rmtree(self.out, ignore_errors=True)
        places = (mode, self.model, self.out, self.options)
        got = self.in_process(name, train_mode, *places)
        if isinstance(got, Failed):
            return [self.failed(name, got)]
        if got.written_s is None:
            if self.options.checkpoint:
                self.notes.append(f"{name}: no room for a checkpoint in {self.out.parent.parent} (--dir)")
            return [*got.cells, "-", "-"]
        size = sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())
        back = self.in_process(name, read_mode, *places, got.bits)
        written = f"{size / got.written_s / 1e6:,.2f}"
        if isinstance(back, Failed):
            return [*got.cells, written, self.failed(f"{name}, reading back", back)]
        return [*got.cells, written, f"{back[0] / back[1] / 1e6:,.2f}"]

    def row(self, name: str, cells: list[str]) -> None:
        """Print the row of a mode, and keep it for the record."""
        row(name, cells)
        figures = dict(zip(COLUMNS, cells, strict=False)) if len(cells) > 1 else {"result": cells[0]}
        self.record.setdefault("modes", {})[name] = figures

    def failed(self, name: str, why: Failed) -> str:
        """Note it; gives what the table says of it."""
        short = "out of memory" if why.memory else "failed"
        self.notes.append(f"{name}: {short}: {why.reason}")
        if not why.memory:
            self.broken = True
            self.notes += [f"    {line}" for line in self.log.read_text(errors="replace").splitlines()[-12:]]
        return short

    def in_process(self, name: str, act: Callable[..., Any], *arguments: Any) -> Any:
        """What `act` gives in a process of its own; Failed where it does not get that far."""
        ours, theirs = self.context.Pipe(duplex=False)
        self.log.write_text("")
        process = self.context.Process(target=answer, args=(theirs, self.log, act, arguments), daemon=True)
        process.start()
        theirs.close()
        got: Any = "starting"
        with ours, contextlib.suppress(EOFError):
            while isinstance(got, str):
                doing = got
                show(f"{name}: {doing}")
                got = ours.recv()
        process.join()
        show("")
        if isinstance(got, str):
            killed = process.exitcode == -signal.SIGKILL
            why = "killed, most likely for the host's memory" if killed else f"exit code {process.exitcode}"
            got = Failed(why, memory=killed)
        return replace(got, reason=f"{doing}: {got.reason}") if isinstance(got, Failed) else got


def show(text: str) -> None:
    """The progress line; where it is no terminal, one line after the other."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def row(name: str, cells: Sequence[str]) -> None:
    """One of the table; a single cell takes the place of all."""
    line = cells[0] if len(cells) == 1 else "".join(f"{cell:>11}" for cell in cells)
    print(f"{name:20}{line}", flush=True)


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--size", choices=SIZES, help="the model's shape (default: 0.5b; without an accelerator tiny)")
    add("--layers", type=int, help="so many layers instead of the shape's own")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--tokens", type=int, help="of the longest sequence (default: 2048; tiny: 64)")
    add("--sequences", type=int, default=16, help="sequences a step (default: 16)")
    add("--steps", type=int, default=4, help="steps, the first is not timed (default: 4)")
    add("--dir", type=Path, help="where model and checkpoints go for a while (default: the temporary folder)")
    add("--json", type=Path, metavar="FILE", help="also write all figures there, to attach to a report")
    add("--no-checkpoint", dest="checkpoint", action="store_false", help="write and read none")
    options = parser.parse_args(argv)
    for name, least in {"layers": 1, "tokens": 4, "sequences": 1, "steps": 2}.items():
        if getattr(options, name) is not None and getattr(options, name) < least:
            parser.error(f"--{name}: at least {least}")
    if options.dir is not None and not options.dir.is_dir():
        parser.error(f"--dir: {options.dir} is no folder")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no folder")
    options.size = options.size or ("0.5b" if torch.cuda.is_available() else "tiny")
    options.tokens = options.tokens or (64 if options.size == "tiny" else 2048)
    return options


def main() -> int:
    options = options_of(None)
    for name in LAUNCHER:
        os.environ.pop(name, None)
    # The folder is removed then, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.dir) as name:
        runner = Runner(Path(name), options)
        runner.run()
        print(*runner.notes, sep="\n")
        if options.json is not None:
            options.json.write_text(json.dumps({**runner.record, "notes": runner.notes}, indent=1) + "\n")
    return 1 if runner.broken else 0


if __name__ == "__main__":
    sys.exit(main())
