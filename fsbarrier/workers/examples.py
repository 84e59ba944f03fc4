"""Phase 8 of the program `sft`: turns examples into one training batch, with marks on what the assistant says.

`python -m fsbarrier.workers.examples --spec SPEC.json`. A text is cut into tokens as the engine would cut it: a prompt by itself, and
then the answer that follows it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fsbarrier.data.examples import read_examples
from fsbarrier.data.tasks import place
from fsbarrier.errors import UsageError, first_line
from fsbarrier.processes.worker_contract import ProgressWriter, run_worker
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import ExamplesReport, ExamplesSpec
from fsbarrier.store import reading
from fsbarrier.training.batch import TrainingSequence, minibatches, write_batch


@ExamplesSpec.program
def work(spec: ExamplesSpec, settings: Settings, progress: ProgressWriter) -> ExamplesReport:
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model, local_files_only=True)

    ends = end_tokens(spec.model, tokenizer)

    def render(messages: list[dict[str, Any]], **given: Any) -> str:
        given = {**settings.rollout.template_arguments, **given}
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **given)
        return text

    found: dict[str, list[TrainingSequence]] = {"train": [], "test": []}
    chosen = {split: indices for split, indices in spec.examples.items() if indices}
    cut = made = 0
    for split, indices in chosen.items():
        path = spec.files[split]
        _, examples = read_examples(path, indices)
        for done, index in enumerate(indices):
            for example in examples[index].split() if settings.sft.split_turns else [examples[index]]:
                try:
                    pieces = example.pieces(render)
                except Exception as error:
                    raise UsageError(
                        f"{place(path, index)}: the chat template: {first_line(error)}"
                    ) from None
                tokens, trained = tokens_of(tokenizer, pieces, ends, plain=example.plain)
                longest = settings.engine.max_model_len
                made, cut = made + 1, cut + (len(tokens) > longest)
                if any(trained[:longest]):
                    found[split].append(sequence(tokens[:longest], trained[:longest]))
            progress.show(done, len(indices), "examples")
    train, held_out = found["train"], found["test"]
    identity = spec.identity
    seed = f"{settings.rollout.seed}:{identity.iteration}"
    steps = minibatches(len(train), settings.trainer.minibatch, settings.trainer.epochs, seed=seed)
    metadata = {
        "run_id": identity.run_id,
        "iteration": identity.iteration,
        "generation": identity.generation,
        "policy_version": spec.policy_version,
    }
    write_batch(spec.batch, [*train, *held_out], steps, metadata)
    return ExamplesReport(
        trajectories=len(train),
        held_out=len(held_out),
        cut_off=cut,
        left_out=made - len(train) - len(held_out),
        tokens=sum(int(one.loss_mask.sum()) for one in train),
        steps=len(steps),
    )


def end_tokens(model: Path, tokenizer: Any) -> set[int]:
    """The tokens with which the model ends an answer, as the engine knows them: one or several in each of these."""
    said = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        if (model / name).is_file():
            eos = reading.json_object(model / name, UsageError).get("eos_token_id")
            said += eos if isinstance(eos, list) else [eos]
    return {token for token in said if isinstance(token, int)}


def tokens_of(
    tokenizer: Any, pieces: Sequence[tuple[str, bool]], ends: Collection[int], *, plain: bool
) -> tuple[list[int], list[bool]]:
    """The tokens of an example, and of each whether it is trained on.

    An answer is trained on up to the end of its turn. Where the template writes no end behind it, that is the end token with which the next
    message begins (GLM's templates), and behind the last answer the tokenizer's.
    """
    tokens: list[int] = []
    trained: list[bool] = []
    special = {number for number, one in tokenizer.added_tokens_decoder.items() if one.special}
    open_end = False
    for text, answer in pieces:
        # A prompt that is plain text gets the tokens that the tokenizer puts around each text, unless it has them.
        around = plain and not answer and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
        found: list[int] = tokenizer(text, add_special_tokens=around)["input_ids"]
        if plain and answer and tokenizer.eos_token_id is not None:
            found.append(tokenizer.eos_token_id)
        end = _end_of_turn(tokenizer, found, ends, special) if answer else None
        last = len(found) - 1 if end is None else end
        tokens += found
        here = [answer and at <= last for at in range(len(found))]
        if open_end and found and found[0] in ends:
            here[0] = True
        trained += here
        open_end = answer and end is None
    if open_end and tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
        trained.append(True)
    # The first token has no prediction.
    return tokens, [False, *trained[1:]]


def _end_of_turn(
    tokenizer: Any, found: Sequence[int], ends: Collection[int], special: Collection[int]
) -> int | None:
    """Where the end of an answer's turn is in its tokens; what a template puts behind it is not trained on. Without one of the model's end
    tokens it is a special token behind which there are only spaces."""
    at = max((at for at, token in enumerate(found) if token in ends), default=None)
    if at is not None:
        return at
    at = max((at for at, token in enumerate(found) if token in special), default=None)
    return at if at is not None and not tokenizer.decode(found[at + 1 :]).strip() else None


def sequence(tokens: Sequence[int], trained: Sequence[bool]) -> TrainingSequence:
    mask = torch.tensor(trained, dtype=torch.uint8)
    # Nobody has sampled these tokens.
    unknown = torch.full((len(tokens),), torch.nan)
    return TrainingSequence(torch.tensor(tokens, dtype=torch.int32), mask, unknown, 1.0, 0.0, current=True)


if __name__ == "__main__":
    sys.exit(run_worker(work))
