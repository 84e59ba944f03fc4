"""Makes tasks that can only be solved by looking, and a tiny vision model: `python scripts/picture_model.py --out DIR [--seed 0]`.

A picture of 64 x 64 pixels shows squares of one colour. The questions are which colour, and how many. With `--blind` the same tasks have
no pictures, for comparison: nothing in the text tells the answer.

The model: Qwen3-VL architecture, about a million parameters, one token a byte. Its *warm start* is supervised fine-tuning on answers that
are right by chance alone, so it knows what an answer looks like and has never used an image; reinforcement learning does the rest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
import transformers
from PIL import Image, ImageDraw
from torch import Tensor

COLOURS: Final = {"r": (220, 30, 30), "g": (30, 180, 60), "b": (40, 60, 220), "y": (235, 215, 40)}
COUNTS: Final = ("1", "2", "3", "4")
SIDE: Final = 64
TRAIN_TASKS: Final = 512
TEST_TASKS: Final = 128
SPECIAL: Final = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A picture becomes one token for each square of this many pixels.
PATCH, MERGE = 16, 2


# --- the model ------------------------------------------------------------------------------------------------------------


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, and those for turns and pictures."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(one, special=True) for one in SPECIAL])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def build_model(seed: int, *, tied: bool = False) -> Any:
    """The tiny policy before any training."""
    torch.manual_seed(seed)
    tokens = build_tokenizer().convert_tokens_to_ids(list(SPECIAL))
    ids = dict(zip(SPECIAL, tokens, strict=True))
    text = {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # vLLM's CPU attention takes 32, 64, 80, 96, ...
        "head_dim": 32,
        "max_position_embeddings": 2048,
        # The three parts are half of what is rotated.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": tied,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
        initializer_range=0.05,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def write_model(model: Any, folder: Path) -> None:
    """The model with its tokenizer and its image processor, in the format of Hugging Face."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    common = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    # These are numbers of pixels; the second one limits a picture's tokens.
    image = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 1024, "longest_edge": 65536},
    }
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 1024, "longest_edge": 65536},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(common | image, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(common | video, indent=1))


# --- the tasks ------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random, colour: str, count: int) -> Image.Image:
    """Squares of one colour in different cells of a grid, on a dark ground."""
    shade = rng.randrange(20, 60)
    picture = Image.new("RGB", (SIDE, SIDE), (shade, shade, shade))
    pen = ImageDraw.Draw(picture)
    cell = SIDE // 2
    for place in rng.sample(range(4), count):
        left, top = cell * (place % 2) + rng.randrange(2, 8), cell * (place // 2) + rng.randrange(2, 8)
        pen.rectangle((left, top, left + 21, top + 21), fill=COLOURS[colour])
    return picture


def questions(rng: random.Random) -> Iterator[tuple[str, str, Image.Image]]:
    """Question, answer and picture, without end."""
    while True:
        colour, count = rng.choice(list(COLOURS)), rng.randrange(1, 5)
        picture = draw(rng, colour, count)
        yield from (("colour?", colour, picture), ("count?", str(count), picture))


def write_tasks(out: Path, seed: int, *, blind: bool = False) -> None:
    """`train.jsonl`, `test.jsonl` and the folder `pictures`."""
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", TRAIN_TASKS), ("test", TEST_TASKS)):
        lines = []
        source = questions(random.Random(f"pictures/{seed}/{split}"))
        for number, (question, answer, picture) in zip(range(count), source, strict=False):
            name = f"pictures/{split}-{number // 2}.png"
            picture.save(out / name)
            shown = [] if blind else [{"type": "image", "image": name}]
            content = [*shown, {"type": "text", "text": question}]
            lines.append(json.dumps({"prompt": [{"role": "user", "content": content}], "answer": answer}))
        (out / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


# --- the warm start -------------------------------------------------------------------------------------------------------


def demonstrations(rng: random.Random, count: int, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Prompts without pictures, each with an answer of the right kind by chance; and where the answers are."""
    texts = []
    for _ in range(count):
        question, answers = rng.choice((("colour?", tuple(COLOURS)), ("count?", COUNTS)))
        texts.append((question, rng.choice(answers)))
    whole = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        for question, answer in texts
    ]
    found = tokenizer(whole, return_tensors="pt", padding=True)
    tokens, mask = found["input_ids"], found["attention_mask"].bool()
    labels = torch.full_like(tokens, -100)
    for row, length in enumerate(mask.sum(1).tolist()):
        labels[row, length - 2 : length] = tokens[row, length - 2 : length]
    return tokens, labels


def warm_start(model: Any, seed: int, steps: int = 120) -> None:
    """Fine-tune `model` in place until it answers in the right form, and right by chance."""
    rng, tokenizer = random.Random(f"pictures/{seed}/warm-start"), build_tokenizer()
    optimizer = torch.optim.AdamW(model.model.language_model.parameters(), lr=1e-3)
    optimizer.add_param_group({"params": model.lm_head.parameters()})
    for _ in range(steps):
        tokens, labels = demonstrations(rng, 32, tokenizer)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks and the model")
    parser.add_argument("--blind", action="store_true", help="tasks without the pictures")
    args = parser.parse_args()
    # One thread gives a deterministic order of additions and therefore the same model everywhere.
    torch.set_num_threads(1)
    args.out.mkdir(parents=True)
    write_tasks(args.out, args.seed, blind=args.blind)
    model = build_model(args.seed)
    warm_start(model, args.seed)
    write_model(model, args.out / "model")
    print(f"{args.out}: {TRAIN_TASKS} and {TEST_TASKS} tasks, and a model that answers by chance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
