"""TRL's side of scripts/bench_trl.py: GRPOTrainer with the model, tasks, batch and optimiser settings that it is given, in one process.

Runs in an environment that has TRL and PyTorch, and imports nothing of fsbarrier. Prints one JSON object a line: when what happened, by
the host's monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def tell(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, "mono_s": time.monotonic(), **fields}), flush=True)


def exact(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """The answer and nothing else, as `reward.kind=exact`."""
    return [float(text_of(said).strip() == wanted) for said, wanted in zip(completions, answer, strict=True)]


def numeric(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """The last number is the answer, as `reward.kind=numeric` for whole numbers."""
    found = [re.findall(r"(?<![\w.)-])-?\d+", text_of(said)) for said in completions]
    return [
        float(bool(numbers) and int(numbers[-1]) == int(wanted))
        for numbers, wanted in zip(found, answer, strict=True)
    ]


def text_of(completion: Any) -> str:
    """TRL gives an answer to a chat as messages, any other as text."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


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
    """The held-out tasks, before the first iteration, after every so-many-th and after the last."""

    def __init__(
        self, tokenizer: Any, tasks: list[dict[str, Any]], steps: int, settings: dict[str, Any]
    ) -> None:
        self.tokenizer, self.tasks, self.steps, self.settings = tokenizer, tasks, steps, settings

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        self.evaluate(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        version, rest = divmod(state.global_step, self.steps)
        if rest == 0:
            tell("updated", iteration=version)
            if version % self.settings["eval_interval"] == 0 or version == self.settings["iterations"]:
                self.evaluate(model, version)

    def evaluate(self, model: Any, version: int) -> None:
        began = time.monotonic()
        prompts = [self.as_text(task["prompt"]) for task in self.tasks]
        inputs = self.tokenizer(
            prompts,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            # A chat template has put the special tokens in already.
            add_special_tokens=isinstance(self.tasks[0]["prompt"], str),
        )
        temperature = self.settings["eval_temperature"]
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        training = model.training
        model.eval()
        with torch.no_grad():
            out = model.generate(
                **inputs,
                **sampling,
                max_new_tokens=self.settings["max_tokens"],
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
            )
        model.train(training)
        said = self.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards = REWARDS[self.settings["reward"]](said, [task["answer"] for task in self.tasks])
        seconds = time.monotonic() - began
        tell("evaluated", version=version, reward=sum(rewards) / len(rewards), seconds=seconds)

    def as_text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


REWARDS = {"exact": exact, "numeric": numeric}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", type=Path, help="the folder with model/, train.jsonl and test.jsonl")
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
        bf16=settings["bf16"],
        seed=settings["seed"],
        max_steps=steps * settings["iterations"],
        per_device_train_batch_size=settings["minibatch"],
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        steps_per_generation=sequences // settings["minibatch"],
        num_generations=settings["samples"],
        num_iterations=settings["epochs"],
        max_completion_length=settings["max_tokens"],
        temperature=settings["temperature"],
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
        model=model,
        reward_funcs=REWARDS[settings["reward"]],
        args=config,
        train_dataset=train,
        processing_class=tokenizer,
    )
    trainer.add_callback(Evaluates(tokenizer, held_out, steps, settings))
    tell("ready", threads=torch.get_num_threads())
    trainer.train()
    tell("done")


if __name__ == "__main__":
    main()
