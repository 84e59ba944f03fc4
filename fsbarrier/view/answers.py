"""The trajectories of a run: an index of one short row each, filters on it, and single trajectories read where they lie.

The index is made from the ranks' files, which can be read group by group without torch, also those that still grow and those that a crash
left. It is kept in memory, for one iteration after the other, as somebody looks at them: nothing is written beside the run.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple, Self

from fsbarrier.data import rank_files
from fsbarrier.data.images import text_of
from fsbarrier.data.rank_file import GroupEntry, read_trajectories
from fsbarrier.data.trajectory import Trajectory, is_judged
from fsbarrier.errors import UsageError
from fsbarrier.rundir.names import SPLITS, parse_trajectories
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sources import nearest
from fsbarrier.wording import visible

#: what can fail, in the order in which a failure is named; the metadata's fields are called like `reward_error`
FAILURES = ("environment", "agent", "reward")


class Group(NamedTuple):
    """Where the trajectories of one task in one iteration lie."""

    split: str
    iteration: int
    path: Path
    entry: GroupEntry


class Answer(NamedTuple):
    """The row of one trajectory. `number`: its place in its group; `reward`: None if it was not scored; `length`: the sampled tokens.

    `failure`: what failed (environment, agent, reward, or "other"), "" if nothing did.
    """

    group: Group
    number: int
    task_id: str
    sample: int
    reward: float | None
    length: int
    cut_off: bool
    failure: str
    node_rank: int
    policy_version: int
    eval_set: str

    @property
    def iteration(self) -> int:
        return self.group.iteration

    @property
    def split(self) -> str:
        return self.group.split

    @property
    def task_index(self) -> int:
        return self.group.entry.task_index


# --- filters ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filter:
    """Which answers to show; None: any. The bounds are included. `words`: a text that prompt or answer must contain, in any case."""

    split: str | None = None
    iteration: int | None = None
    task: str | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: int | None = None
    length_to: int | None = None
    cut_off: bool | None = None
    failed: bool | None = None
    node: int | None = None
    version: int | None = None
    set: str | None = None
    words: str | None = None

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Self:
        """The filter that these values describe; an empty one counts as absent. Raises UsageError, which names the field."""
        values: dict[str, Any] = {}
        for name, text in texts.items():
            kind = KINDS.get(name)
            if kind is None:
                known = ", ".join(KINDS)
                raise UsageError(f"{name}: is no filter{nearest(name, KINDS) or f'; there are {known}'}")
            if text:
                values[name] = kind(name, text)
        return cls(**values)

    def to_texts(self) -> dict[str, str]:
        """The filter's values as texts, as `from_texts` reads them."""
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        return {
            name: ("yes" if value else "no") if isinstance(value, bool) else str(value)
            for name, value in named.items()
            if value is not None
        }

    def admits(self, answer: Answer) -> bool:
        """Whether the row passes all parts of the filter but `words`, for which the trajectory must be read."""
        if self.reward_from is not None or self.reward_to is not None:
            low = -math.inf if self.reward_from is None else self.reward_from
            high = math.inf if self.reward_to is None else self.reward_to
            if answer.reward is None or not low <= answer.reward <= high:
                return False
        return (
            (self.task is None or answer.task_id == self.task)
            and (self.length_from is None or answer.length >= self.length_from)
            and (self.length_to is None or answer.length <= self.length_to)
            and (self.cut_off is None or answer.cut_off is self.cut_off)
            and (self.failed is None or bool(answer.failure) is self.failed)
            and (self.node is None or answer.node_rank == self.node)
            and (self.version is None or answer.policy_version == self.version)
            and (self.set is None or answer.eval_set == self.set)
        )


def _a_split(name: str, text: str) -> str:
    if text not in SPLITS:
        raise UsageError(f"{name}: must be {' or '.join(SPLITS)}, got {text!r}")
    return text


def _a_number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise UsageError(f"{name}: must be a number, got {text!r}")
    return number


def _a_whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}: must be a whole number, got {text!r}") from None


def _yes_or_no(name: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise UsageError(f"{name}: must be yes or no, got {text!r}")
    return text == "yes"


#: how each field of a filter is read from a text
KINDS: Mapping[str, Callable[[str, str], object]] = {
    "split": _a_split,
    **dict.fromkeys(("iteration", "length_from", "length_to", "node", "version"), _a_whole_number),
    **dict.fromkeys(("reward_from", "reward_to"), _a_number),
    **dict.fromkeys(("cut_off", "failed"), _yes_or_no),
    **dict.fromkeys(("task", "set", "words"), lambda _, text: text),
}

#: the orders of a list of answers; an unscored one comes last
ORDERS: Mapping[str, Callable[[Answer], Any]] = {
    "newest": lambda answer: (-answer.iteration, answer.task_index, answer.sample),
    "worst": lambda answer: (answer.reward is None, answer.reward or 0.0),
    "best": lambda answer: (answer.reward is None, -(answer.reward or 0.0)),
    "longest": lambda answer: -answer.length,
    "shortest": lambda answer: answer.length,
    "task": lambda answer: (answer.task_index, -answer.iteration, answer.sample),
}


# --- the index ----------------------------------------------------------------------------------------------------------------


class AnswerIndex:
    """The rows of a run's trajectories. Several threads may use it; one at a time reads files."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        #: (split, iteration) -> the files that were read, with their sizes, and the rows
        self._rows: dict[tuple[str, int], tuple[frozenset[tuple[str, int, int]], list[Answer]]] = {}

    def iterations(self) -> dict[str, list[int]]:
        """The iterations of each split that have files of ranks, the newest first."""
        return {split: sorted(files, reverse=True) for split in SPLITS if (files := self._files(split))}

    def answers(self, split: str, iteration: int) -> list[Answer]:
        """All answers of an iteration. Reads the files that came or grew since the last call. Raises FsbarrierError."""
        return self._answers(split, iteration, self._files(split).get(iteration, ()))

    def _answers(
        self, split: str, iteration: int, read_files: Iterable[tuple[str, int, int]]
    ) -> list[Answer]:
        files = frozenset(read_files)
        with self._lock:
            known = self._rows.get((split, iteration))
            if known is None or known[0] != files:
                known = files, self._read(split, iteration)
                self._rows[split, iteration] = known
            return known[1]

    def matching(self, wanted: Filter, goes_on: Callable[[int, int], bool]) -> Iterator[Answer]:
        """The answers that pass the filter, the newest iterations first.

        `goes_on` is told how many of how many iterations are done, and stops the search by False. Raises FsbarrierError.
        """
        places = [
            (split, iteration, files)
            for split in SPLITS
            if wanted.split in (None, split)
            for iteration, files in self._files(split).items()
            if wanted.iteration in (None, iteration)
        ]
        places.sort(key=lambda place: -place[1])
        for done, place in enumerate(places):
            if not goes_on(done, len(places)):
                return
            chosen = filter(wanted.admits, self._answers(*place))
            yield from _with_words(chosen, wanted.words) if wanted.words else chosen

    def _files(self, split: str) -> dict[int, list[tuple[str, int, int]]]:
        """iteration -> name, size and time of each rank's file."""
        by_iteration: dict[int, list[tuple[str, int, int]]] = {}
        try:
            for path in self._paths.trajectories(split).iterdir():
                name = parse_trajectories(path.name)
                if name is not None and name.rank is not None and name.split == split:
                    there = path.lstat()
                    by_iteration.setdefault(name.iteration, []).append(
                        (path.name, there.st_size, there.st_mtime_ns)
                    )
        except OSError:
            # The folder does not exist yet, or a file has just been removed; the next call lists the folder again.
            pass
        return by_iteration

    def _read(self, split: str, iteration: int) -> list[Answer]:
        rows: dict[tuple[Path, int], list[Answer]] = {}

        def take(path: Path, entry: GroupEntry, trajectories: Sequence[Trajectory]) -> None:
            group = Group(split, iteration, path, entry)
            rows[path, entry.task_index] = [
                _row(group, number, trajectory) for number, trajectory in enumerate(trajectories)
            ]

        found: dict[int, list[Answer]] = {}
        for file in rank_files.find(self._paths.root, split, iteration, take):
            for task in file.tasks if file.mergeable else ():
                found.setdefault(task, rows[file.path, task])
        return [answer for task in sorted(found) for answer in found[task]]


def read_answer(answer: Answer) -> Trajectory:
    """The whole trajectory. Raises StoreError, FormatError."""
    return read_group(answer.group)[answer.number]


def read_group(group: Group) -> list[Trajectory]:
    """The trajectories of a group. Raises StoreError, FormatError."""
    return read_trajectories(group.path, group.entry)


def _with_words(answers: Iterator[Answer], words: str) -> Iterator[Answer]:
    """The answers whose prompt or text contains the words. Each group is read once."""
    group: Group | None = None
    trajectories: list[Trajectory] = []
    for answer in answers:
        if answer.group is not group:
            group, trajectories = answer.group, read_group(answer.group)
        if words.casefold() in said_in(trajectories[answer.number]).casefold():
            yield answer


def said_in(trajectory: Mapping[str, Any]) -> str:
    """All texts of a trajectory: its messages, or its prompt and answer."""
    messages, prompt = trajectory.get("messages"), trajectory.get("prompt", "")
    messages_said = [*messages] if isinstance(messages, list) else []
    messages_said += prompt if isinstance(prompt, list) and not messages_said else []
    texts = [text_of(message.get("content")) for message in messages_said if isinstance(message, Mapping)]
    alone = [prompt] if isinstance(prompt, str) and not messages_said else []
    return "\n".join([*alone, *texts, str(trajectory.get("text", ""))])


def failure_of(trajectory: Mapping[str, Any]) -> str:
    """What failed in a trajectory; "" if nothing did."""
    metadata = trajectory.get("metadata")
    notes = metadata if isinstance(metadata, Mapping) else {}
    named = next((what for what in FAILURES if f"{what}_error" in notes), "")
    return named or ("other" if "error" in notes or trajectory.get("valid") is False else "")


def _row(group: Group, number: int, trajectory: Mapping[str, Any]) -> Answer:
    """The row of a trajectory. A user's own program may write any values into a trajectory's fields."""
    reward, mask = trajectory.get("reward"), trajectory.get("loss_mask")
    known = isinstance(reward, int | float) and math.isfinite(reward) and is_judged(trajectory)
    return Answer(
        group=group,
        number=number,
        task_id=intern(visible(trajectory.get("task_id", group.entry.task_index))),
        sample=_whole(trajectory.get("sample"), number),
        reward=float(reward) if known and isinstance(reward, int | float) else None,
        length=mask.count(1) if isinstance(mask, array) else 0,
        cut_off=trajectory.get("finish_reason") == "length",
        failure=failure_of(trajectory),
        node_rank=_whole(trajectory.get("node_rank"), -1),
        policy_version=_whole(trajectory.get("policy_version"), -1),
        eval_set=intern(visible(trajectory.get("eval_set", ""))),
    )


def _whole(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise
