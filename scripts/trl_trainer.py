"""TRL's side of scripts/bench_trl.py: GRPOTrainer on the demonstration's model, tasks, batch and optimiser settings, in one process.

Runs in an environment that has TRL and PyTorch, and imports nothing of fsbarrier. Prints one JSON object a line: when what happened, by
the host's monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def tell(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, "mono_s": time.monotonic(), **fields}), flush=True)


def exact(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The demonstration's reward: the answer and nothing else."""
    return [float(said.strip() == wanted) for said, wanted in zip(completions, answer, strict=True)]


class Timed(GRPOTrainer):  # type: ignore[misc]
    """Tells how long sampling takes, and what comes with it until there is a batch."""

    generate_s = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        made = super()._generate(*args, **kwargs)
        self.generate_s = time.monotonic() - began
        return made

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        tell("rollout_began")
        made = super()._generate_and_score_completions(*args, **kwargs)
        tell("batch_ready", generate_s=self.generate_s)
        return made


class Evaluates(TrainerCallback):  # type: ignore[misc]
    """After each iteration, the held-out tasks, sampled as in training."""

    def __init__(self, tokenizer: Any, tasks: list[dict[str, str]], steps: int, max_tokens: int) -> None:
        self.tokenizer, self.tasks, self.steps, self.max_tokens = tokenizer, tasks, steps, max_tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        self.evaluate(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        if state.global_step % self.steps == 0:
            tell("updated", iteration=state.global_step // self.steps)
            self.evaluate(model, state.global_step // self.steps)

    def evaluate(self, model: Any, version: int) -> None:
        began = time.monotonic()
        prompts = [task["prompt"] for task in self.tasks]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        training = model.training
        model.eval()
        with torch.no_grad():
            out = model.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=self.max_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
            )
        model.train(training)
        said = self.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards = exact(said, [task["answer"] for task in self.tasks])
        seconds = time.monotonic() - began
        tell("evaluated", version=version, reward=sum(rewards) / len(rewards), seconds=seconds)


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", type=Path, help="the demonstration's folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", type=json.loads, help="what both sides do, as JSON")
    args = parser.parse_args()
    settings = args.settings
    torch.manual_seed(settings["seed"])
    tokenizer = AutoTokenizer.from_pretrained(args.task / "model")
    model = AutoModelForCausalLM.from_pretrained(args.task / "model", dtype=torch.float32)
    keep = ("prompt", "answer")
    train = Dataset.from_list([{k: row[k] for k in keep} for row in lines(args.task / "train.jsonl")])
    held_out = lines(args.task / "test.jsonl")[: settings["eval_tasks"]]
    sequences = settings["tasks"] * settings["samples"]
    steps = sequences // settings["minibatch"] * settings["epochs"]
    config = GRPOConfig(
        output_dir=str(args.out),
        use_cpu=True,
        bf16=False,
        seed=settings["seed"],
        max_steps=steps * settings["iterations"],
        per_device_train_batch_size=settings["minibatch"],
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        steps_per_generation=sequences // settings["minibatch"],
        num_generations=settings["samples"],
        num_iterations=settings["epochs"],
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=settings["lr"],
        warmup_steps=settings["warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Timed(
        model=model, reward_funcs=exact, args=config, train_dataset=train, processing_class=tokenizer
    )
    trainer.add_callback(Evaluates(tokenizer, held_out, steps, settings["max_tokens"]))
    tell("ready", threads=torch.get_num_threads())
    trainer.train()
    tell("done")


if __name__ == "__main__":
    main()
