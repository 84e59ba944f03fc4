"""Sample trajectories in the report: the best and the worst of the newest iteration with merged files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsbarrier.data import images, rank_files
from fsbarrier.data.rank_file import FormatError, GroupEntry, read_trajectories
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.rundir.names import MERGED, SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.wording import amount, one_line, printable

TITLES = {"train": "Answers in training", "test": "Held-out answers"}
#: Limits per message and on the number of messages, because an episode may contain whole web pages.
MOST_CHARACTERS = 1500
MOST_MESSAGES = 12
#: maximum number of images per trajectory, and the length of their longer side in pixels
MOST_IMAGES, IMAGE_SIDE = 8, 320
#: Groups are read into memory; larger ones are skipped.
MOST_BYTES = 16 << 20


#: a message's role, its text, and small copies of its images as data: URLs
ShownMessage = tuple[str, str, list[str]]
#: a trajectory's label, its facts (reward, task …), its messages, and how many more there are
ShownTrajectory = tuple[str, str, list[ShownMessage], int]
#: the title of a merged file's samples, the samples, and why there are none
SplitSamples = tuple[str, list[ShownTrajectory], str]


def samples(paths: RunPaths, newest: int) -> list[SplitSamples]:
    """For each split, the samples of the newest iteration up to `newest` that has a merged file."""
    return [shown for split in SPLITS if (shown := _split(paths, split, newest))]


def of_iteration(paths: RunPaths, iteration: int) -> dict[str, SplitSamples]:
    """By split: the samples of this iteration, if it has a merged file."""
    by_split = {split: _split(paths, split, iteration, oldest=iteration) for split in SPLITS}
    return {split: shown for split, shown in by_split.items() if shown is not None}


def _split(paths: RunPaths, split: str, newest: int, oldest: int = 1) -> SplitSamples | None:
    folder = paths.trajectories(split)
    merges = MERGED.parse_all(os.listdir(folder)) if folder.is_dir() else []
    # `newest` comes from a journal, and may be any number.
    iteration = max(
        (merge.iteration for merge in merges if merge.split == split and oldest <= merge.iteration <= newest),
        default=0,
    )
    if not iteration:
        return None
    title = f"{TITLES[split]}, iteration {iteration}"
    try:
        chosen = choose(_groups(paths, split, iteration))
        kept_in = paths.images(split, iteration)
        samples = [_sample(label, trajectory, kept_in) for label, trajectory in chosen]
    # A user's own program may write arbitrary values into a trajectory's fields.
    except (
        StoreError,
        FormatError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
    ) as error:
        name = paths.merged(split, iteration).name
        return title, [], one_line(f"cannot show {name}: {error}")
    return title, samples, "" if samples else "No scored trajectory can be shown."


#: a group, and the rank's file that contains it
GroupInFile = tuple[Path, GroupEntry]


def _groups(paths: RunPaths, split: str, iteration: int) -> list[GroupInFile]:
    """The groups in the ranks' files, which can be read one by one, unlike those of a merged file."""
    places: dict[int, GroupInFile] = {}
    for item in rank_files.find(paths.root, split, iteration):
        for group in item.file.groups if item.mergeable and item.file else ():
            places.setdefault(group.task_index, (item.path, group))
    return [places[task] for task in sorted(places)]


def choose(groups: Sequence[GroupInFile]) -> list[tuple[str, Trajectory]]:
    """(label, trajectory) for the best of the group with the highest mean reward, and the worst of the group with the lowest. Raises
    StoreError, FormatError."""
    groups = [
        (path, group)
        for path, group in groups
        if group.stats.reward_mean is not None and group.end - group.offset <= MOST_BYTES
    ]
    if not groups:
        return []
    by_mean = sorted(groups, key=lambda place: place[1].stats.reward_mean or 0.0)
    best = max(_judged(by_mean[-1]), key=_reward)
    worst = min(_judged(by_mean[0]), key=_reward)
    same = (best["task_id"], best["sample"]) == (worst["task_id"], worst["sample"])
    return [("best", best), *([] if same else [("worst", worst)])]


def _judged(place: GroupInFile) -> list[Trajectory]:
    trajectories = read_trajectories(*place)
    return [trajectory for trajectory in trajectories if trajectory.get("valid", True)] or trajectories


def _reward(trajectory: Trajectory) -> float:
    return float(trajectory["reward"])


def _sample(label: str, trajectory: Trajectory, kept_in: Path) -> ShownTrajectory:
    """Format one trajectory. `kept_in`: the folder of its images."""
    parts = trajectory.get("reward_parts") or {}
    facts = [
        f"reward {amount(_reward(trajectory))}",
        *(f"{part} {amount(value)}" for part, value in parts.items() if len(parts) > 1),
        f"task {trajectory['task_id']}",
        f"node {trajectory['node_rank']}",
        *([f"{len(trajectory['token_ids'])} tokens"] if "token_ids" in trajectory else []),
        *(["cut off"] if trajectory.get("finish_reason") == "length" else []),
    ]
    messages = _messages(trajectory)
    shown_messages, room = list[ShownMessage](), MOST_IMAGES
    for role, content in messages[:MOST_MESSAGES]:
        text, shown = _text_and_images(content, kept_in, room)
        shown_messages.append((printable(role), _shortened(text), shown))
        room -= len(shown)
    return label, one_line(" · ".join(facts)), shown_messages, max(0, len(messages) - MOST_MESSAGES)


def _messages(trajectory: Trajectory) -> Sequence[tuple[str, object]]:
    """(role, text) in order. Trajectories written by other programs may lack any field."""
    if messages := trajectory.get("messages"):
        return [entry for message in messages for entry in _entries(message)]
    prompt = trajectory.get("prompt", "")
    asked = (
        [("prompt", prompt)]
        if isinstance(prompt, str)
        else [(message.get("role", ""), message.get("content")) for message in prompt]
    )
    return [*asked, ("answer", trajectory.get("text", ""))]


def _entries(message: Mapping[str, object]) -> list[tuple[str, object]]:
    """A message as (role, content), after its thoughts if it has any."""
    role, thoughts = str(message.get("role", "")), message.get("reasoning_content")
    return [*([(f"{role}, thinking", thoughts)] if thoughts else []), (role, message.get("content"))]


def _text_and_images(content: object, kept_in: Path, room: int) -> tuple[str, list[str]]:
    """A message's text, and its images as data: URLs, at most `room`. The text marks the omitted images."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), []
    texts, pictures = [], list[str]()
    for part in images.parts_of(content):
        name = images.source_of(part)
        if name is None:
            texts.append(images.text_of([part]) or json.dumps(part, ensure_ascii=False))
        elif len(pictures) >= room:
            texts.append("[image]")
        else:
            try:
                pictures.append(images.thumbnail(kept_in / Path(name).name, IMAGE_SIDE))
            except (ProgramFailed, ValueError, ImportError) as error:
                texts.append(f"[image: {error}]")
    return "\n".join(texts), pictures


def _shortened(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]} … {len(text) - MOST_CHARACTERS:,} more characters"
    return "\n".join(printable(line) for line in text.splitlines())
