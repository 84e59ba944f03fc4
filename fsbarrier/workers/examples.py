"""Phase 8 of the program `sft`: turns examples into one training batch, with marks on what the assistant says.

`python -m fsbarrier.workers.examples --spec SPEC.json`. A text is cut into tokens as the engine would cut it: a prompt by itself, and
then the answer that follows it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers

from fsbarrier.data.tasks import place, read_examples
from fsbarrier.errors import UsageError, first_line
from fsbarrier.processes.worker_contract import ProgressWriter, run_worker
from fsbarrier.settings.sections import Settings
from fsbarrier.training.batch import TrainingSequence, minibatches, write_batch


class ExamplesSpec(TypedDict):
    """The fields of the spec that this program uses."""

    run_id: str
    iteration: int
    generation: int
    policy_version: int
    #: the folder of the policy to train, with its tokenizer
    model: str
    #: the files of examples, and which of their examples to take; those of "test" are held out
    files: Mapping[str, str]
    examples: Mapping[str, Sequence[int]]
    #: the file to write
    batch: str


def work(spec: ExamplesSpec, settings: Settings, progress: ProgressWriter) -> dict[str, object]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"], local_files_only=True)

    def render(messages: list[dict[str, str]], **given: object) -> str:
        given |= settings.rollout.template_arguments
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **given)
        return text

    found: dict[str, list[TrainingSequence]] = {"train": [], "test": []}
    chosen = {split: indices for split, indices in spec["examples"].items() if indices}
    cut = 0
    for split, indices in chosen.items():
        path = Path(spec["files"][split])
        _, examples = read_examples(path, indices)
        for done, index in enumerate(indices):
            try:
                pieces = examples[index].pieces(render)
            except Exception as error:
                raise UsageError(f"{place(path, index)}: the chat template: {first_line(error)}") from None
            tokens, trained = tokens_of(tokenizer, pieces, plain=examples[index].plain)
            longest = settings.engine.max_model_len
            cut += len(tokens) > longest
            if any(trained[:longest]):
                found[split].append(sequence(tokens[:longest], trained[:longest]))
            progress.show(done, len(indices), "examples")
    train, held_out = found["train"], found["test"]
    seed = f"{settings.rollout.seed}:{spec['iteration']}"
    steps = minibatches(len(train), settings.trainer.minibatch, settings.trainer.epochs, seed=seed)
    metadata = {name: spec[name] for name in ("run_id", "iteration", "generation", "policy_version")}
    write_batch(Path(spec["batch"]), [*train, *held_out], steps, metadata)
    return {
        "trajectories": len(train),
        "held_out": len(held_out),
        # Longer than engine.max_model_len; and of all, those of which nothing to train on was left.
        "cut_off": cut,
        "left_out": sum(map(len, chosen.values())) - len(train) - len(held_out),
        "tokens": sum(int(one.loss_mask.sum()) for one in train),
        "steps": len(steps),
    }


def tokens_of(
    tokenizer: Any, pieces: Sequence[tuple[str, bool]], *, plain: bool
) -> tuple[list[int], list[bool]]:
    """The tokens of an example, and of each whether it is trained on. An answer ends with its last special token, the end of a turn;
    what a template puts behind that is not trained on."""
    tokens: list[int] = []
    trained: list[bool] = []
    special = {number for number, one in tokenizer.added_tokens_decoder.items() if one.special}
    for text, answer in pieces:
        # A prompt that is plain text gets the tokens that the tokenizer puts around each text, unless it has them.
        around = plain and not answer and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
        found: list[int] = tokenizer(text, add_special_tokens=around)["input_ids"]
        if plain and answer and tokenizer.eos_token_id is not None:
            found.append(tokenizer.eos_token_id)
        last = max((at for at, token in enumerate(found) if token in special), default=len(found) - 1)
        tokens += found
        trained += [answer and at <= last for at in range(len(found))]
    # The first token has no prediction.
    return tokens, [False, *trained[1:]]


def sequence(tokens: Sequence[int], trained: Sequence[bool]) -> TrainingSequence:
    mask = torch.tensor(trained, dtype=torch.uint8)
    # Nobody has sampled these tokens.
    unknown = torch.full((len(tokens),), torch.nan)
    return TrainingSequence(torch.tensor(tokens, dtype=torch.int32), mask, unknown, 1.0, 0.0, current=True)


if __name__ == "__main__":
    sys.exit(run_worker(work))
