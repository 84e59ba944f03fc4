"""Makes the demo's tasks and model: `python scripts/demo_model.py --out DIR [--seed 0]`, about half a minute.

The package contains what seed 0 gives (fsbarrier/data/demo); other seeds are for scripts/learning_curve.py.

The task: `dcba=` must be answered with `abcd` and the end token. A hash of the prompt decides whether each of the 26^4 prompts is for
training or held out, so the two files never share a prompt.

The model: Qwen2 architecture, 0.5 M parameters, untied output head, one token a character. Its *warm start* is supervised fine-tuning on
demonstrations of which 60 % are wrong, until sampling solves a quarter of fresh prompts. The model then knows the answer format and still
explores; reinforcement learning does the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tokenizers
import torch
import transformers
from torch import Tensor

RECIPE: Final = "sort4-v1"

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
LENGTH: Final = 4
TRAIN_TASKS: Final = 4096
TEST_TASKS: Final = 512
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, "=", *LETTERS))}
PROMPT_TOKENS = LENGTH + 1
# The end of the text is a token too.
ANSWER_TOKENS = LENGTH + 1
# The label that cross_entropy leaves out.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Parameters of the warm start; about 200 steps, less than 20 s on one core."""

    # How many of the demonstrations are wrong.
    wrong_share: float = 0.6
    # Sampled at temperature 1, the mean of the last two looks.
    target_accuracy: float = 0.25
    batch: int = 128
    lr: float = 2e-3
    warmup_steps: int = 20
    first_look: int = 60
    look_every: int = 10
    look_prompts: int = 512
    max_steps: int = 400


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
        # vLLM's CPU attention takes 32, 64, 80, 96, ...
        head_dim=32,
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
    return torch.tensor([[*encode(answer_for(prompt)), VOCABULARY[EOS]] for prompt in prompts])


def sampled_accuracy(
    model: transformers.Qwen2ForCausalLM, prompts: list[str], generator: torch.Generator
) -> float:
    """Share of `prompts` answered exactly right by one sample each at temperature 1."""
    tokens = torch.tensor([encode(prompt) for prompt in prompts])
    for _ in range(ANSWER_TOKENS):
        with torch.no_grad():
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
        answer = [*encode(demonstration(prompt, recipe.wrong_share, rng)), VOCABULARY[EOS]]
        padding = ANSWER_TOKENS - len(answer)
        inputs.append([*encode(prompt), *answer, *[VOCABULARY[PAD]] * padding])
        labels.append([*[IGNORED] * PROMPT_TOKENS, *answer, *[IGNORED] * padding])
    return torch.tensor(inputs), torch.tensor(labels)


def warm_start(model: transformers.Qwen2ForCausalLM, seed: int, recipe: WarmStart) -> int:
    """Fine-tune `model` in place until it reaches the target accuracy; returns the number of steps.

    The accuracy is measured on fresh training prompts; held-out prompts are never used.
    """
    rng = random.Random(f"{RECIPE}/{seed}/warm-start")
    source = prompts(rng, held_out=False)
    looked_at = distinct_prompts(random.Random(f"{RECIPE}/{seed}/looks"), recipe.look_prompts, held_out=False)
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
                return step
    return recipe.max_steps


# --- the tasks ------------------------------------------------------------


def answer_for(prompt: str) -> str:
    """The correct answer to a prompt such as `dcba=`: its letters in order."""
    return "".join(sorted(prompt[:LENGTH]))


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is held out (a tenth of them); depends only on the prompt."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 == 0


def prompts(rng: random.Random, *, held_out: bool) -> Iterator[str]:
    """Infinite random prompts of one side of the split, with repetitions."""
    while True:
        prompt = "".join(rng.choice(LETTERS) for _ in range(LENGTH)) + "="
        if is_held_out(prompt) == held_out:
            yield prompt


def distinct_prompts(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """`count` distinct prompts of one side of the split, in random order."""
    found: dict[str, None] = {}
    for prompt in prompts(rng, held_out=held_out):
        found[prompt] = None
        if len(found) == count:
            return list(found)
    raise AssertionError("unreachable: prompts() is endless")


def demonstration(prompt: str, wrong_share: float, rng: random.Random) -> str:
    """A demonstration for the warm start, correct with probability 1 - `wrong_share`.

    A wrong one is, with equal probability, the correct answer reversed, the unsorted letters, or the correct answer with one
    letter missing; for a few prompts (`aaaa=`) it is correct anyway.
    """
    right = answer_for(prompt)
    if rng.random() >= wrong_share:
        return right
    kind = rng.randrange(3)
    if kind == 0:
        return right[::-1]
    if kind == 1:
        return prompt[:LENGTH]
    missing = rng.randrange(LENGTH)
    return right[:missing] + right[missing + 1 :]


def write_tasks(out: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl` into `out`, with `task_id`, `prompt` and `answer` per line. Raises OSError."""
    for name, held_out, count in (("train", False, TRAIN_TASKS), ("test", True, TEST_TASKS)):
        rng = random.Random(f"{RECIPE}/{seed}/{name}")
        lines = [
            json.dumps(
                {"task_id": f"sort4-{prompt[:LENGTH]}", "prompt": prompt, "answer": answer_for(prompt)}
            )
            for prompt in distinct_prompts(rng, count, held_out=held_out)
        ]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks and the model; the package has 0")
    args = parser.parse_args()
    # One thread gives a deterministic order of additions and therefore the same model everywhere.
    torch.set_num_threads(1)
    args.out.mkdir(parents=True)
    write_tasks(args.out, args.seed)
    model = build_model(args.seed)
    steps = warm_start(model, args.seed, WarmStart())
    held_out = [json.loads(line)["prompt"] for line in (args.out / "test.jsonl").read_text().splitlines()]
    accuracy = sampled_accuracy(model, held_out, torch.Generator().manual_seed(args.seed))
    model.save_pretrained(args.out / "model")
    build_tokenizer().save_pretrained(args.out / "model")
    print(f"{args.out}: {steps} steps, {accuracy:.0%} of the held-out tasks solved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
