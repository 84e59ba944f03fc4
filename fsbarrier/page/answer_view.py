"""One answer: the conversation, the parts of its reward, what failed, its tokens; and all answers to one task side by side."""

from __future__ import annotations

import json
from asyncio import to_thread
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from nicegui import Client, ui

from fsbarrier.data import images
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import FsbarrierError, ProgramFailed
from fsbarrier.page.answers_view import place
from fsbarrier.page.layout import html, link, page
from fsbarrier.page.open_runs import OpenRun, OpenRuns
from fsbarrier.page.render import part
from fsbarrier.page.tokens import COLOURS, MOST_TOKENS, colours_of, spans
from fsbarrier.rundir.names import SPLITS
from fsbarrier.training.group_weights import weigh_group
from fsbarrier.view.answers import Answer, read_group, said_in
from fsbarrier.view.conversation import Turn, turns
from fsbarrier.wording import duration, visible

#: characters of a turn, turns, images of an answer, and the longer side of each in pixels
MOST_CHARACTERS, MOST_TURNS, MOST_IMAGES, IMAGE_SIDE = 20_000, 200, 40, 640
LEGENDS = {
    "logprob": "The stronger the orange, the less likely the engine thought the token that it sampled.",
    "teacher": "Blue: more likely to the policy than to its teacher; orange: less likely.",
    "version": "White: the oldest policy version that sampled tokens of this answer; blue: newer ones.",
}


class Gone(Exception):
    """What an address names is not there."""


def find(opened: OpenRun, query: Mapping[str, str]) -> tuple[list[Answer], list[Trajectory]]:
    """A group's rows and trajectories. It reads files, so call it in a thread. Raises Gone, FsbarrierError."""
    try:
        split, iteration, task = query["split"], int(query["iteration"]), int(query["task"])
    except (KeyError, ValueError):
        raise Gone("The address must name a split, an iteration and a task.") from None
    if split not in SPLITS:
        raise Gone("There is no such split.")
    rows = [answer for answer in opened.answers.answers(split, iteration) if answer.task_index == task]
    if not rows:
        raise Gone("There is no such group; its files may have been removed (checkpoint.keep_trajectories).")
    return rows, read_group(rows[0].group)


def weights(opened: OpenRun, group: Sequence[Trajectory]) -> list[float | None]:
    """The advantage of each trajectory, as far as its group decides it; None where it is not trained on."""
    settings = opened.record.settings
    try:
        weighed = weigh_group(group, settings.algorithm, settings.rollout.max_tokens)
    # A user's own program may write any values.
    except (LookupError, TypeError, ValueError):
        return [None] * len(group)
    by_id = {id(trajectory): weight for trajectory, weight in weighed}
    return [by_id.get(id(trajectory)) for trajectory in group]


def with_images(
    opened: OpenRun, answer: Answer, conversation: Sequence[Turn]
) -> list[tuple[Turn, list[tuple[str, str]]]]:
    """Each turn with (data: URL, problem) of its images, read from the folder of the iteration's images. For threads."""
    folder = opened.record.paths.images(answer.split, answer.iteration)
    turns_with_images, room = [], MOST_IMAGES
    for turn in conversation[:MOST_TURNS]:
        shown: list[tuple[str, str]] = []
        for source in turn.images:
            room -= 1
            try:
                if room < 0:
                    raise ProgramFailed(f"more than {MOST_IMAGES} images in this answer")
                # Only a name in that folder is read, whatever the trajectory says.
                shown.append((images.thumbnail(folder / source.rpartition("/")[2], IMAGE_SIDE), ""))
            except (ProgramFailed, ValueError, ImportError) as error:
                shown.append(("", str(error)))
        turns_with_images.append((turn, shown))
    return turns_with_images


def facts(answer: Answer, trajectory: Mapping[str, Any], weight: float | None) -> list[tuple[str, str]]:
    """What is known of an answer, in a few words each."""
    parts, timings = trajectory.get("reward_parts"), trajectory.get("timings")
    known = [("advantage", f"{weight:+.4f}")] if weight is not None else []
    known += (
        [(f"reward.{name}", _short(value)) for name, value in parts.items()]
        if isinstance(parts, Mapping)
        else []
    )
    known += [
        ("tokens", str(answer.length)),
        ("ended by", str(trajectory.get("finish_reason", "?"))),
        ("node", str(answer.node_rank)),
        ("policy version", str(answer.policy_version)),
    ]
    known += [("turns", str(trajectory["turns"]))] if trajectory.get("turns") else []
    known += [("set", answer.eval_set)] if answer.eval_set else []
    for name, value in timings.items() if isinstance(timings, Mapping) else ():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        known.append((str(name).removesuffix("_s"), duration(float(value)) if number else _short(value)))
    return known


def notes(trajectory: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The words of what failed, and everything else in the metadata."""
    metadata = trajectory.get("metadata")
    listed = metadata.items() if isinstance(metadata, Mapping) else ()
    failed = [(str(name), str(value)) for name, value in listed if str(name).endswith("error")]
    return failed, [(str(name), _short(value)) for name, value in listed if not str(name).endswith("error")]


def _short(value: object) -> str:
    said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return said if len(said) <= 300 else f"{said[:300]}…"


async def show(client: Client, opened: OpenRun) -> None:
    """One answer."""
    query = dict(client.request.query_params) if client.request is not None else {}
    with page(client, f"{opened.name}: an answer", opened.name, "Answers"):
        try:
            rows, group = await to_thread(find, opened, query)
            number = int(query.get("number", "0"))
            answer, trajectory = rows[number], group[number]
        except (Gone, FsbarrierError, ValueError, IndexError) as error:
            html(part("problem", "This answer cannot be shown", str(error), link(opened.name, "answers")))
            return
        weight = weights(opened, group)[number]
        html(part("answer_head", answer, weight, _links(opened.name, rows, number)))
        failed, others = notes(trajectory)
        html(part("facts", facts(answer, trajectory, weight)))
        html(part("failures", failed))
        conversation = turns(trajectory)
        whole = link(
            opened.name,
            "text",
            split=answer.split,
            iteration=answer.iteration,
            task=answer.task_index,
            number=number,
        )
        html(
            part(
                "conversation",
                await to_thread(with_images, opened, answer, conversation),
                MOST_CHARACTERS,
                whole,
            )
        )
        if len(conversation) > MOST_TURNS:
            html(part("facts", [("turns that are not shown", str(len(conversation) - MOST_TURNS))]))
        if others:
            ui.label("What the task says").classes("heading").props("role=heading aria-level=2")
            html(part("facts", others))
        await _show_tokens(opened, trajectory, query)


def _links(run: str, rows: Sequence[Answer], number: int) -> list[tuple[str, str, str]]:
    """(title, address, relation) of each link on the page of an answer."""
    answer = rows[number]
    links = [
        (
            "all answers of the iteration",
            link(run, "answers", split=answer.split, iteration=answer.iteration),
            "",
        ),
        ("side by side with its group", place(run, answer, "group"), ""),
        (
            "this task in all iterations",
            link(run, "answers", split=answer.split, iteration="all", task=answer.task_id, order="newest"),
            "",
        ),
    ]
    links += [("previous [", place(run, rows[number - 1], "answer"), "prev")] if number else []
    links += [("next ]", place(run, rows[number + 1], "answer"), "next")] if number + 1 < len(rows) else []
    return links


async def _show_tokens(opened: OpenRun, trajectory: Mapping[str, Any], query: Mapping[str, str]) -> None:
    colours = colours_of(trajectory)
    ids = trajectory.get("token_ids")
    if not colours or ids is None:
        return
    first = int(query["from"]) if query.get("from", "").isdecimal() else 0
    text_of = await to_thread(opened.token_texts)
    ui.label("Tokens").classes("heading").props("role=heading aria-level=2")
    if text_of is None:
        ui.label(
            "Their ids: this machine has no tokenizer of the model (or lacks the package tokenizers)."
        ).classes("muted")
    chosen = ui.toggle({name: COLOURS[name] for name in colours}, value=colours[0]).props("no-caps dense")
    shown = html("")

    def draw() -> None:
        colour = str(chosen.value)
        made = spans(trajectory, colour, first, text_of or (lambda number: f"{number} "))
        hidden = max(0, len(ids) - first - MOST_TOKENS)
        more = f"?{urlencode({**query, 'from': first + MOST_TOKENS})}"
        shown.set_content(part("tokens", made, colour, LEGENDS[colour], hidden, more))

    chosen.on_value_change(draw)
    draw()


async def show_group(client: Client, opened: OpenRun) -> None:
    """All answers to one task in one iteration, with their advantages."""
    query = dict(client.request.query_params) if client.request is not None else {}
    with page(client, f"{opened.name}: a group", opened.name, "Answers"):
        try:
            rows, group = await to_thread(find, opened, query)
        except (Gone, FsbarrierError) as error:
            html(part("problem", "This group cannot be shown", str(error), link(opened.name, "answers")))
            return
        weighed = weights(opened, group)
        first = turns(group[0])
        ui.label(visible(f"Task {rows[0].task_id} in iteration {rows[0].iteration}")).classes("heading")
        cards = [
            (
                answer,
                weight,
                "\n\n".join(turn.text for turn in turns(trajectory)[1:]),
                place(opened.name, answer, "answer"),
            )
            for answer, weight, trajectory in zip(rows, weighed, group, strict=True)
        ]
        html(part("group", first[0].text if first else "", cards))


def whole_text(runs: OpenRuns, name: str, split: str, iteration: int, task: int, number: int) -> str:
    """All texts of a trajectory, for reading as plain text; if it is not there, a line that says so."""
    try:
        opened = runs.get(name)
        if opened is None:
            raise Gone("There is no such run.")
        _, group = find(opened, {"split": split, "iteration": str(iteration), "task": str(task)})
        return visible(said_in(group[number]))
    except (Gone, FsbarrierError, IndexError) as error:
        return visible(error)
