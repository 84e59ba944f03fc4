"""Makes the demonstration: task files and a tiny model that answers about a quarter of the held-out tasks.

    python -m fsbarrier.workers.demo_model --out DIR [--seed 0]

DIR gets train.jsonl, test.jsonl, model/ (a Hugging Face folder) and READY, all in one step; nothing happens where DIR is ready.

The model (Qwen2 architecture, 0.5 M parameters, characters as tokens, output head untied) gets a *warm start*: supervised
fine-tuning on demonstrations of which 60 % are wrong (fsbarrier.start.demo_tasks.demonstration), until it answers a quarter of fresh
prompts right when sampled. It thereby learns the form of an answer and to spread its bets; reinforcement does the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import tokenizers
import torch
import transformers
from torch import Tensor

from fsbarrier import files
from fsbarrier.errors import UsageError
from fsbarrier.start import demo_tasks
from fsbarrier.supervision import signals

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, "=", *demo_tasks.LETTERS))}
PROMPT_TOKENS = demo_tasks.LENGTH + 1
ANSWER_TOKENS = demo_tasks.LENGTH + 1  # the end of the text is one
IGNORED = -100  # what cross_entropy leaves out

LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class WarmStart:
    """Parameters of the warm start; about 200 steps, less than 20 s on one core."""

    wrong_share: float = 0.6  # of the demonstrations; see fsbarrier.start.demo_tasks.demonstration
    target_accuracy: float = 0.25  # sampled at temperature 1, mean of the last two looks
    batch: int = 128
    lr: float = 2e-3
    warmup_steps: int = 20
    first_look: int = 60
    look_every: int = 10
    look_prompts: int = 512
    max_steps: int = 400


Progress = Callable[[int, float], None]
"""Called with the steps done and the last known accuracy."""


def build_model(seed: int) -> transformers.Qwen2ForCausalLM:
    """The tiny policy before any training. Untied: an engine that reloads weights in place may miss a tied output head."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU attention takes 32, 64, 80, 96, ...
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
    )
    return transformers.Qwen2ForCausalLM(config)


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character; nothing is added in front of a prompt."""
    model = tokenizers.models.WordLevel(VOCABULARY, unk_token=UNKNOWN)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def encode(text: str) -> list[int]:
    return [VOCABULARY[letter] for letter in text]


def right_answers(prompts: list[str]) -> Tensor:
    """int64[prompts, ANSWER_TOKENS]: what each prompt must be answered with, the end of the text included."""
    return torch.tensor([[*encode(demo_tasks.answer_for(prompt)), VOCABULARY[EOS]] for prompt in prompts])


@torch.no_grad()
def sampled_accuracy(
    model: transformers.Qwen2ForCausalLM, prompts: list[str], generator: torch.Generator
) -> float:
    """Share of `prompts` answered exactly right by one sample each at temperature 1."""
    tokens = torch.tensor([encode(prompt) for prompt in prompts])
    for _ in range(ANSWER_TOKENS):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1].float()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
    right = (tokens[:, PROMPT_TOKENS:] == right_answers(prompts)).all(dim=1)
    return float(right.float().mean())


def demonstrations(source: Iterator[str], recipe: WarmStart, rng: random.Random) -> tuple[Tensor, Tensor]:
    """One batch: token ids and labels, both int64[batch, PROMPT_TOKENS + ANSWER_TOKENS]; prompts and padding carry no label."""
    inputs, labels = [], []
    for _ in range(recipe.batch):
        prompt = next(source)
        answer = [*encode(demo_tasks.demonstration(prompt, recipe.wrong_share, rng)), VOCABULARY[EOS]]
        padding = ANSWER_TOKENS - len(answer)
        inputs.append([*encode(prompt), *answer, *[VOCABULARY[PAD]] * padding])
        labels.append([*[IGNORED] * PROMPT_TOKENS, *answer, *[IGNORED] * padding])
    return torch.tensor(inputs), torch.tensor(labels)


def warm_start(model: transformers.Qwen2ForCausalLM, seed: int, recipe: WarmStart, progress: Progress) -> int:
    """Fine-tune `model` in place until it is as good as the recipe wants; gives the steps it took.

    The looks use fresh prompts of the training side: the held-out ones play no part in making the model.
    """
    rng = random.Random(f"{demo_tasks.RECIPE}/{seed}/warm-start")
    source = demo_tasks.prompts(rng, held_out=False)
    looked_at = demo_tasks.distinct_prompts(
        random.Random(f"{demo_tasks.RECIPE}/{seed}/looks"), recipe.look_prompts, held_out=False
    )
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    accuracy = before = 0.0
    for step in range(1, recipe.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, step / recipe.warmup_steps)
        tokens, labels = demonstrations(source, recipe, rng)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= recipe.first_look and step % recipe.look_every == 0:
            before, accuracy = accuracy, sampled_accuracy(model, looked_at, generator)
            if (before + accuracy) / 2 >= recipe.target_accuracy:
                progress(step, accuracy)
                return step
        progress(step, accuracy)
    return recipe.max_steps


def make(out: Path, seed: int, recipe: WarmStart, progress: Progress) -> None:
    """Make the demo folder at `out` in one step. Of several at once all but one find it made. Raises UsageError, OSError."""
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
            os.rename(staging, out)  # onto nothing or an empty folder; anything else is left alone
        except OSError as error:
            if not demo_tasks.is_ready(out):
                raise UsageError(
                    f"--out {out}: {error.strerror}; it is there but is no complete demo folder: remove it"
                ) from None
        files.fsync_dir(out.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _flush(folder: Path) -> None:
    """What libraries wrote gets the same durability as what fsbarrier.files writes."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Progress]:
    """A bar on a terminal, a line now and then elsewhere. It ends early when the model is good enough."""

    def told(step: int, accuracy: float) -> str:
        return f"step {step}" + (f", accuracy {accuracy:.2f}" if accuracy else "")

    if not sys.stderr.isatty():

        def tell(step: int, accuracy: float) -> None:
            if step % 50 == 0:
                print(f"warm start: {told(step, accuracy)}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("warm start"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, note="")

        def show(step: int, accuracy: float) -> None:
            bar.update(task, completed=step, note=told(step, accuracy))

        yield show
        bar.update(task, completed=total)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fsbarrier.workers.demo_model",
        description="Make the built-in task and its tiny model (about half a minute).",
        epilog="example: python -m fsbarrier.workers.demo_model --out demo --seed 1",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another model (default 0)")
    return parser.parse_args()


def ensure(out: Path, seed: int) -> None:
    """Make `out` unless it is ready; whoever comes second waits for the first. Raises UsageError, OSError."""
    if demo_tasks.is_ready(out):
        return
    files.make_dirs(out.parent)
    # The lock only saves double work: on a filesystem without locks, or past its deadline, the rename in make() decides.
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
    # One thread: always the same order of additions, so the same model everywhere; and at this size a second one gains little
    # on a quiet machine and loses a factor of ten on a busy one, where threads spin while they wait for each other.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    out = args.out.absolute()
    try:
        ensure(out, args.seed)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"--out {out}: cannot be made: {error.strerror or error}", file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        return 130
    print(f"{out}: {(out / 'READY').read_text(encoding='utf-8').strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
