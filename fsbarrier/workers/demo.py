"""Makes the built-in task and its tiny model: `python -m fsbarrier.workers.demo --out DIR [--seed N]` (about half a minute, CPU).

The model is a Qwen2 of half a million parameters with a character tokenizer, warmed up on demonstrations of which 60 % are wrong,
until it answers about a quarter of the prompts rightly: enough for reinforcement to find what to reinforce, and far from solved.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fsbarrier import demo
from fsbarrier.files import make_dirs, write_atomic

PAD, EOS, EQUALS = 0, 1, 2
VOCABULARY = {"<pad>": PAD, "<eos>": EOS, "=": EQUALS} | {
    letter: 3 + i for i, letter in enumerate(demo.LETTERS)
}
MODEL_TOKENS = 32  # the vocabulary, rounded up

WRONG_SHARE = 0.6
WARM_ACCURACY = 0.25
WARM_BATCH, WARM_LR, WARM_RAMP = 128, 2e-3, 20
WARM_STEPS_MIN, WARM_STEPS_MAX, WARM_CHECK = 60, 400, 10


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def make_model(seed: int) -> Qwen2ForCausalLM:
    """The untrained model; untied, with heads of 32, which is what vLLM's attention on CPUs takes."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=MODEL_TOKENS,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen2ForCausalLM(config)


def encode(prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids and labels of one demonstration, padded: labels only on the answer and its end."""
    ids = [VOCABULARY[c] for c in prompt + answer] + [EOS]
    labels = [-100] * len(prompt) + ids[len(prompt) :]
    missing = 2 * demo.LENGTH + 2 - len(ids)
    return ids + [PAD] * missing, labels + [-100] * missing


@torch.no_grad()
def sampled_accuracy(model: Any, prompts: list[str], generator: torch.Generator) -> float:
    """The share of prompts answered rightly, sampling one answer each at temperature 1."""
    tokens = torch.tensor([[VOCABULARY[c] for c in prompt] for prompt in prompts])
    for _ in range(demo.LENGTH + 1):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    wanted = torch.tensor([[VOCABULARY[c] for c in demo.answer_for(prompt)] + [EOS] for prompt in prompts])
    return float((tokens[:, demo.LENGTH + 1 :] == wanted).all(1).float().mean())


def demonstrations(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of noisy demonstrations: tokens and labels, [batch, length]."""
    rng = random.Random(f"warm/{seed}")
    prompts = demo.prompts(rng, held_out=False)
    while True:
        chosen = [next(prompts) for _ in range(WARM_BATCH)]
        pairs = [encode(prompt, demo.demonstration(prompt, WRONG_SHARE, rng)) for prompt in chosen]
        yield torch.tensor([tokens for tokens, _ in pairs]), torch.tensor([labels for _, labels in pairs])


def warm_up(model: Any, seed: int, progress: Progress) -> float:
    """Train until two checks in a row average WARM_ACCURACY on trainable prompts; gives the last accuracy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR, betas=(0.9, 0.95), weight_decay=0.0)
    checked = demo.distinct_prompts(random.Random(7), 512, held_out=False)
    generator = torch.Generator().manual_seed(seed + 1)
    bar = progress.add_task("warming the tiny model up", total=WARM_ACCURACY)
    accuracy = 0.0
    for step, (tokens, labels) in zip(range(1, WARM_STEPS_MAX + 1), demonstrations(seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = WARM_LR * min(1.0, step / WARM_RAMP)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % WARM_CHECK == 0 and step >= WARM_STEPS_MIN:
            before, accuracy = accuracy, sampled_accuracy(model, checked, generator)
            progress.update(bar, completed=min(WARM_ACCURACY, accuracy))
            if (before + accuracy) / 2 >= WARM_ACCURACY:
                break
    return accuracy


def make(out: Path, seed: int) -> None:
    """Fill `out`, which appears in one step: of two makers at once one is first, and the other's is dropped. Raises OSError."""
    if demo.is_ready(out):
        return
    staging = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
    try:
        make_dirs(staging)
        demo.write_tasks(staging, seed)
        model = make_model(seed)
        with Progress() as progress:
            accuracy = warm_up(model, seed, progress)
        model.save_pretrained(staging / "model", safe_serialization=True)
        make_tokenizer().save_pretrained(staging / "model")
        ready = {"recipe": demo.RECIPE, "seed": seed, "sampled_accuracy": round(accuracy, 3)}
        write_atomic(staging / "READY", json.dumps(ready).encode(), durable=True)
        try:
            os.rename(staging, out)
        except OSError:
            if not demo.is_ready(out):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="make the built-in task and its tiny model")
    parser.add_argument("--out", type=Path, required=True, help="the folder to fill")
    parser.add_argument("--seed", type=int, default=0, help="of the model, its warm start and the tasks")
    args = parser.parse_args()
    make(args.out, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
