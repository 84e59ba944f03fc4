"""An answer as lines for a terminal: `fsbarrier logs --answers`."""

from __future__ import annotations

from collections.abc import Iterator

from fsbarrier.view.answers import Answer, read_answer
from fsbarrier.view.conversation import turns
from fsbarrier.wording import amount, visible

#: characters of a turn that are shown
MOST_CHARACTERS = 4000


def answer_lines(answer: Answer) -> Iterator[str]:
    """Its facts, and its turns. Control characters are shown as escapes. Raises StoreError, FormatError."""
    trajectory = read_answer(answer)
    reward = "not scored" if answer.reward is None else f"reward {amount(answer.reward)}"
    facts = [
        reward,
        f"task {answer.task_id}",
        f"{answer.split} iteration {answer.iteration}",
        f"sample {answer.sample}",
        f"{answer.length} tokens",
        f"node {answer.node_rank}",
        f"policy version {answer.policy_version}",
        *(["cut off"] if answer.cut_off else []),
        *([f"{answer.failure} failed"] if answer.failure else []),
    ]
    yield f"=== {' · '.join(facts)}"
    metadata = trajectory.get("metadata")
    for name, value in metadata.items() if isinstance(metadata, dict) else ():
        if str(name).endswith("error"):
            yield from _indented(f"{name}: {value}")
    for turn in turns(trajectory):
        yield f"--- {visible(turn.role)}"
        yield from _indented(turn.text)
        for name, arguments in turn.calls:
            yield from _indented(f"calls {name}({arguments})")
    yield ""


def _indented(text: str) -> Iterator[str]:
    more = f" … {len(text) - MOST_CHARACTERS:,} more characters" if len(text) > MOST_CHARACTERS else ""
    return (f"    {visible(line)}" for line in f"{text[:MOST_CHARACTERS]}{more}".split("\n"))
