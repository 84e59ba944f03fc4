"""Phase 8 of the program `sft`: turns examples into one training batch, in which the assistant's tokens are marked.

`python -m fsbarrier.workers.examples --spec SPEC.json`. Texts are tokenized as for the engine: a prompt by itself, and then the
answer that follows it.
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
from fsbarrier.training.batch import TrainingSequence, batch_metadata, minibatches, write_batch


@ExamplesSpec.program
def work(spec: ExamplesSpec, settings: Settings, progress: ProgressWriter) -> ExamplesReport:
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model, local_files_only=True)

    ends = end_tokens(spec.model, tokenizer)

    def render(messages: list[dict[str, Any]], **given: Any) -> str:
        given = {**settings.rollout.template_arguments, **given}
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **given)
        return text

    sequences: dict[str, list[TrainingSequence]] = {"train": [], "test": []}
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
                    sequences[split].append(sequence(tokens[:longest], trained[:longest]))
            progress.show(done, len(indices), "examples")
    train, held_out = sequences["train"], sequences["test"]
    identity = spec.identity
    seed = f"{settings.rollout.seed}:{identity.iteration}"
    steps = minibatches(len(train), settings.trainer.minibatch, settings.trainer.epochs, seed=seed)
    metadata = batch_metadata(identity, spec.policy_version)
    write_batch(spec.batch, [*train, *held_out], steps, metadata)
    return ExamplesReport(
        trajectories=len(train),
        held_out=len(held_out),
        cut_off=cut,
        left_out=made - len(train) - len(held_out),
        tokens=sum(int(example.loss_mask.sum()) for example in train),
        steps=len(steps),
    )


def end_tokens(model: Path, tokenizer: Any) -> set[int]:
    """The tokens with which the model ends an answer: one or several in each of the tokenizer and the files that the engine reads."""
    candidates = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        if (model / name).is_file():
            eos = reading.json_object(model / name, UsageError).get("eos_token_id")
            candidates += eos if isinstance(eos, list) else [eos]
    return {token for token in candidates if isinstance(token, int)}


def tokens_of(
    tokenizer: Any, pieces: Sequence[tuple[str, bool]], ends: Collection[int], *, plain: bool
) -> tuple[list[int], list[bool]]:
    """Return the tokens of an example, and for each whether it is trained on.

    An answer is trained on up to the token that ends its turn. If the template writes none after an answer, this is the end token with
    which the next message begins (GLM's templates), and after the last answer the tokenizer's own.
    """
    tokens: list[int] = []
    trained: list[bool] = []
    open_end = False
    for text, answer in pieces:
        # A plain-text prompt gets the tokens that the tokenizer puts around each text, unless it has them already.
        around = plain and not answer and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
        ids: list[int] = tokenizer(text, add_special_tokens=around)["input_ids"]
        if plain and answer and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        end = _end_of_turn(tokenizer, ids, ends) if answer else None
        last = len(ids) - 1 if end is None else end
        tokens += ids
        marks = [answer and at <= last for at in range(len(ids))]
        if open_end and ids and ids[0] in ends:
            marks[0] = True
        trained += marks
        open_end = answer and end is None
    if open_end and tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
        trained.append(True)
    # The first token has no prediction.
    return tokens, [False, *trained[1:]]


def _end_of_turn(tokenizer: Any, tokens: Sequence[int], ends: Collection[int]) -> int | None:
    """The index of the token that ends an answer's turn; the template's tokens after it are not trained on. It is the last of the model's
    end tokens, or without one a special token that only spaces follow; None if there is neither."""
    at = max((at for at, token in enumerate(tokens) if token in ends), default=None)
    if at is not None:
        return at
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    at = max((at for at, token in enumerate(tokens) if token in special), default=None)
    return at if at is not None and not tokenizer.decode(tokens[at + 1 :]).strip() else None


def sequence(tokens: Sequence[int], trained: Sequence[bool]) -> TrainingSequence:
    mask = torch.tensor(trained, dtype=torch.uint8)
    # These tokens were not sampled, so they have no log-probabilities.
    unknown = torch.full((len(tokens),), torch.nan)
    return TrainingSequence(torch.tensor(tokens, dtype=torch.int32), mask, unknown, 1.0, 0.0, current=True)


if __name__ == "__main__":
    sys.exit(run_worker(work))
