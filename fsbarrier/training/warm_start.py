"""The demo model: a tiny policy with a single-character tokenizer, and its warm start.

Qwen2 architecture, 0.5 M parameters, untied output head. The *warm start* is supervised fine-tuning on demonstrations of which 60 % are
wrong (fsbarrier.data.demo_tasks.demonstration), until sampling solves a quarter of fresh prompts. The model then knows the answer format
and still explores; reinforcement learning does the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tokenizers
import torch
import transformers
from torch import Tensor

from fsbarrier.data import demo_tasks

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, "=", *demo_tasks.LETTERS))}
PROMPT_TOKENS = demo_tasks.LENGTH + 1
# The end of the text is a token too.
ANSWER_TOKENS = demo_tasks.LENGTH + 1
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


# Called with the steps done and the last known accuracy.
Progress = Callable[[int, float], None]


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
    return torch.tensor([[*encode(demo_tasks.answer_for(prompt)), VOCABULARY[EOS]] for prompt in prompts])


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
        answer = [*encode(demo_tasks.demonstration(prompt, recipe.wrong_share, rng)), VOCABULARY[EOS]]
        padding = ANSWER_TOKENS - len(answer)
        inputs.append([*encode(prompt), *answer, *[VOCABULARY[PAD]] * padding])
        labels.append([*[IGNORED] * PROMPT_TOKENS, *answer, *[IGNORED] * padding])
    return torch.tensor(inputs), torch.tensor(labels)


def warm_start(model: transformers.Qwen2ForCausalLM, seed: int, recipe: WarmStart, progress: Progress) -> int:
    """Fine-tune `model` in place until it reaches the target accuracy; returns the number of steps.

    The accuracy is measured on fresh training prompts; held-out prompts are never used.
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
