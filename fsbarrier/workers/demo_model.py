"""Creates the demo: task files and a tiny model that solves about a quarter of the held-out tasks.

    python -m fsbarrier.workers.demo_model --out DIR [--seed 0]

DIR gets train.jsonl, test.jsonl, model/ (a Hugging Face folder) and READY, created atomically. Does nothing if DIR is ready.
fsbarrier/training/warm_start.py describes the model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import torch
import transformers

from fsbarrier.data import demo_tasks
from fsbarrier.errors import UsageError
from fsbarrier.processes import signals
from fsbarrier.store import files, owned
from fsbarrier.training.warm_start import (
    Progress,
    WarmStart,
    build_model,
    build_tokenizer,
    sampled_accuracy,
    warm_start,
)

LOCK_TIMEOUT_S = 600.0


def make(out: Path, seed: int, recipe: WarmStart, progress: Progress) -> None:
    """Create the demo folder at `out` atomically. If several processes race, one creates it. Raises UsageError, OSError."""
    staging = files.temporary_beside(out)
    files.make_dirs(staging)
    try:
        began = time.monotonic()
        demo_tasks.write_tasks(staging, seed)
        model = build_model(seed)
        steps = warm_start(model, seed, recipe, progress)
        lines = (staging / "test.jsonl").read_text(encoding="utf-8").splitlines()
        held_out = [json.loads(line)["prompt"] for line in lines]
        accuracy = sampled_accuracy(model, held_out, torch.Generator().manual_seed(seed))
        model.save_pretrained(staging / "model")
        build_tokenizer().save_pretrained(staging / "model")
        ready = {
            "recipe": demo_tasks.RECIPE,
            "seed": seed,
            "steps": steps,
            "held_out_accuracy": round(accuracy, 4),
            "seconds": round(time.monotonic() - began, 1),
        }
        _flush(staging)
        files.write_atomic(staging / "READY", (json.dumps(ready) + "\n").encode(), durable=True)
        try:
            # Succeeds only if `out` does not exist or is empty.
            os.rename(staging, out)
        except OSError as error:
            if not demo_tasks.is_ready(out):
                raise UsageError(
                    f"--out {out}: {error.strerror}; it exists but is not a complete demo folder; remove it"
                ) from None
        files.fsync_dir(out.parent)
    finally:
        owned.discard(staging)


def _flush(folder: Path) -> None:
    """fsync the files written by libraries."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Progress]:
    """A progress bar on a terminal, occasional lines elsewhere. Training ends early when the model is good enough."""

    def describe(step: int, accuracy: float) -> str:
        return f"step {step}" + (f", accuracy {accuracy:.2f}" if accuracy else "")

    if not sys.stderr.isatty():

        def tell(step: int, accuracy: float) -> None:
            if step % 50 == 0:
                print(f"warm start: {describe(step, accuracy)}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("warm start"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, note="")

        def show(step: int, accuracy: float) -> None:
            bar.update(task, completed=step, note=describe(step, accuracy))

        yield show
        bar.update(task, completed=total)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fsbarrier.workers.demo_model",
        description="Create the built-in task and its tiny model (takes about half a minute).",
        epilog="example: python -m fsbarrier.workers.demo_model --out demo --seed 1",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to create")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the model (default 0)")
    return parser.parse_args()


def ensure(out: Path, seed: int) -> None:
    """Create `out` unless it is ready; a second process waits for the first. Raises UsageError, OSError."""
    if demo_tasks.is_ready(out):
        return
    files.make_dirs(out.parent)
    # The lock only avoids duplicate work: without locks, or after the timeout, the rename in make() decides.
    lock = filelock.FileLock(out.with_name(f".{out.name}.lock"), timeout=LOCK_TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError, filelock.Timeout):
            stack.enter_context(lock)
        if demo_tasks.is_ready(out):
            return
        recipe = WarmStart()
        with progress_bar(recipe.max_steps) as progress:
            make(out, seed, recipe, progress)


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, signals.end)
    os.umask(0o077)
    # One thread gives a deterministic order of additions and therefore the same model everywhere. At this size a second thread gains
    # little on an idle machine and costs a factor of ten on a busy one, because threads spin while waiting.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    # transformers imports torchao, which warns of kernels for accelerators. A person would see that, in the middle of the bar.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    out = args.out.absolute()
    try:
        ensure(out, args.seed)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"--out {out}: cannot create the folder: {error.strerror or error}", file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        return 130
    print(f"{out}: {(out / 'READY').read_text(encoding='utf-8').strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
