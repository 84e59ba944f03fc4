"""Check tasks, model and reward together, in seconds and without an engine.

It checks what a start checks. Then it shows the first tasks as the policy will see them, the lengths of prompts, equal prompts, and the
rewards that the reference answers of the first tasks get, and nonsense.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from fsbarrier.cli.commands import flags
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.wording import counted, printable

if TYPE_CHECKING:
    from fsbarrier.data.tasks import Task
    from fsbarrier.settings.sections import Settings

EXAMPLE = "fsbarrier check /data/math --model Qwen2.5-0.5B-Instruct reward.kind=math"
#: tasks that are shown, and tasks whose reward is tried
SHOWN, TRIED = 2, 8
#: longest prompt that is shown whole, in characters
MOST_SHOWN = 2000
NONSENSE = "purple because the of seventeen-ish??"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="the folder with the tasks, as --data-path")
    model = "the model: a folder, or a name in DATA or the local cache"
    flags.add(parser, {"--config FILE.toml": flags.CONFIG})
    parser.add_argument("--model", metavar="M", required=True, help=model)
    flags.add_settings(parser, "reward.kind=math")


def main(args: argparse.Namespace) -> int:
    from fsbarrier.cli.start import model_folder, node_checks, preflight, task_files
    from fsbarrier.data import tasks
    from fsbarrier.settings.resolve import resolve
    from fsbarrier.settings.sections import known_names
    from fsbarrier.settings.sources import from_file, from_words

    data = preflight.absolute(args.data)
    task_files.check_folder(data)
    chosen = [
        *(from_file(Path(args.config)) if args.config else ()),
        ChosenValue("data_path", str(data), "DATA"),
        ChosenValue("model", args.model, "--model"),
        *from_words(args.settings, known_names()),
    ]
    settings = resolve(chosen)
    folder = model_folder.find_model(args.model, data, os.environ)
    model_folder.check_lengths(folder, settings)
    named = task_files.needed_files(settings)
    tried: list[Task] = []
    for split, source in task_files.read_tasks(data, named, settings, model=folder, say=print).items():
        read = tasks.read_tasks(Path(source["path"]))
        print(printable(f"{split}: {counted(read.count, 'task')} in {read.path}"), flush=True)
        listed = list(read.tasks.values())
        tried = tried or listed[:TRIED]
        for line in _described(listed, folder, settings):
            print(line)
    node_checks.try_user_code(settings)
    for line in asyncio.run(_rewards(tried, settings)):
        print(printable(line))
    return 0


def _described(tasks: Sequence[Task], folder: Path, settings: Settings) -> Iterator[str]:
    from fsbarrier.cli.start import chat_template, task_files

    arguments, limit = settings.rollout.template_arguments, settings.engine.max_model_len
    counter = task_files.counter(folder, arguments)
    if counter is None:
        yield "  prompts: not counted, as the model has no tokenizer.json that this environment reads"
    else:
        lengths = {task.task_id: counter(task) for task in tasks}
        longest = max(lengths, key=lengths.__getitem__)
        answer = settings.rollout.max_tokens
        cut = sum(length + answer > limit for length in lengths.values())
        yield printable(
            f"  prompts: {median(lengths.values()):,.0f} tokens in the middle, {lengths[longest]:,} at most (task {longest})"
        )
        yield (
            f"  answers: rollout.max_tokens={answer:,} fits into engine.max_model_len={limit:,} after each prompt"
            if not cut
            else f"  answers: after {counted(cut, 'prompt')}, engine.max_model_len={limit:,} leaves fewer than "
            f"rollout.max_tokens={answer:,} tokens"
        )
    equal = len(tasks) - len({repr(task.prompt) for task in tasks})
    if equal:
        yield f"  {counted(equal, 'prompt')} equal to an earlier one"
    conversations = any(not isinstance(task.prompt, str) for task in tasks[:SHOWN])
    render = chat_template.renderer(folder, "the prompt") if conversations else None
    for task in tasks[:SHOWN]:
        text = task.prompt if isinstance(task.prompt, str) else ""
        if not text and render is not None:
            text = chat_template.rendered(render, task, arguments)
        more = "" if len(text) <= MOST_SHOWN else f"\n… and {len(text) - MOST_SHOWN:,} characters more"
        yield printable(f"  task {task.task_id}, as the policy sees it:")
        yield from (f"    | {printable(line)}" for line in (text[:MOST_SHOWN] + more).split("\n"))


async def _rewards(tasks: Sequence[Task], settings: Settings) -> list[str]:
    """Show the rewards of some tasks' reference answers, and of nonsense."""
    from fsbarrier.rewards.kinds import open_reward
    from fsbarrier.rewards.score import Answer
    from fsbarrier.settings.value_types import reward_kinds, scoring_engines

    own = settings.reward
    if "judge" in reward_kinds(own.kind) or scoring_engines(own.kind):
        return [f"reward.kind={own.kind}: not tried, as it asks a model"]
    if "code" in reward_kinds(own.kind):
        return [f"reward.kind={own.kind}: not tried, as the tasks have tests and no programs"]
    known = [task for task in tasks if task.answer is not None]
    if not known:
        return [f"reward.kind={own.kind}: not tried, as the first tasks have no answer"]
    reward = open_reward(own.kind, weights=own.weights, timeout_s=own.timeout_s, judge=settings.judge)
    try:
        await reward.open()
        pairs = [
            await reward.score_group(task, [Answer(_text(task.answer)), Answer(NONSENSE)]) for task in known
        ]
    finally:
        await reward.close()
    if problem := next((score.error for pair in pairs for score in pair if score.error), None):
        return [f"reward.kind={own.kind}: fails: {problem}"]
    right, wrong = (sum(pair[number].reward for pair in pairs) / len(pairs) for number in (0, 1))
    means = f"reward.kind={own.kind}: {right:g} for the reference answer, {wrong:g} for nonsense (mean of {len(pairs)})"
    return [means] if right > wrong else [f"{means}: it does not tell them apart"]


def _text(answer: object) -> str:
    return str(answer[0]) if isinstance(answer, list) and answer else str(answer)
