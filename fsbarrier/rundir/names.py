"""Every name under the run directory, in both directions: what builds a name also reads it.

A kind of name is one template: `GENERATION.build(12)` is "gen-000012.json", and `GENERATION.parse("gen-000012.json")` is 12.
Any other name in a directory (an editor's backup, a temporary file) parses as None, and readers skip it.
fsbarrier/rundir/paths.py says where each name lies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Generic, TypeVar

T = TypeVar("T")

SPLITS = ("train", "test")

# Longer numbers are not ours, and Python refuses to read numbers of thousands of digits.
_MOST_DIGITS = 18


class Name(Generic[T]):
    """One kind of name. The template's fields are numbers (`{:d}`, or `{:06d}` with leading zeros) and words (`{:s}`)."""

    def __init__(self, template: str, meaning: Callable[..., T]) -> None:
        """`meaning` makes what `parse` gives from the fields, in the template's order."""
        self.template, self._meaning = template, meaning
        fields = [(literal, spec) for literal, _, spec, _ in Formatter().parse(template)]
        groups = [re.escape(literal) + _group(spec or "") for literal, spec in fields]
        self._pattern = re.compile("".join(groups), re.ASCII)
        self._types = [str if spec == "s" else int for _, spec in fields if spec]
        # A node that waits lists the same directories many times a second and asks about the same names each time.
        self.build: Callable[..., str] = lru_cache(maxsize=4096)(template.format)
        self.parse: Callable[[str], T | None] = lru_cache(maxsize=4096)(self._parse)

    def _parse(self, name: str) -> T | None:
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        return self._meaning(*(read(text) for read, text in zip(self._types, match.groups(), strict=True)))

    def parse_all(self, names: Iterable[str]) -> list[T]:
        """What those of the names mean that are of this kind."""
        return [found for name in names if (found := self.parse(name)) is not None]


def _group(spec: str) -> str:
    """What a field of a template may look like in a name: exactly what `build` writes, so that "gen-12.json" does not match."""
    if spec in ("", "s"):
        return r"(\w+)" if spec else ""
    width = int(spec[:-1] or 1)
    return rf"(\d{{{width}}}|[1-9]\d{{{width},{_MOST_DIGITS - 1}}})"


# --- coordination/ ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class StartName:
    """One start of a node: its files in joins/ and beats/ are named after it."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, order=True)
class PulseName:
    """How far the counter of one start's heartbeat has come while that node runs in one generation, by the name alone."""

    rank: int
    incarnation: int
    generation: int
    counter: int


@dataclass(frozen=True, slots=True, order=True)
class PhaseName:
    """The folder of one row of the program."""

    index: int
    name: str


@dataclass(frozen=True, slots=True, order=True)
class FactName:
    """What a node said about its row, by its name alone: "done" or "failed"."""

    iteration: int
    rank: int
    status: str


@dataclass(frozen=True, slots=True, order=True)
class CallName:
    """What a member of a group called in its row, by the name of its fact alone."""

    iteration: int
    rank: int
    call: str


START = Name("node-{:04d}.inc-{:04d}.json", StartName)
PULSE = Name("node-{:04d}.inc-{:04d}.gen-{:06d}.pulse-{:d}", PulseName)
GENERATION = Name("gen-{:06d}.json", int)
GENERATION_FOLDER = Name("gen-{:06d}", int)
PHASE_FOLDER = Name("p{:02d}-{:s}", PhaseName)
FACT = Name("iter-{:06d}.node-{:04d}.{:s}", FactName)
CALL_FACT = Name(f"{FACT.template}.done", CallName)
#: what the names of facts have in common: of one iteration how they begin, of one call how they end, of one node what is in between
ITERATIONS_FACTS = Name("iter-{:06d}.", int)
CALLS_FACTS = Name(".{:s}.done", str)
NODES_FACTS = Name(".node-{:04d}.", int)
#: there while the leader's facts about that iteration are
OPEN_FOLDER = Name("open-{:06d}", int)
STOP_REQUEST = Name("{:06d}.json", int)
#: beside them, so that daemons see it in the listing that they make anyway; its key is a number, or says what broke
DEBUG_REQUEST = Name("debug-{:s}.json", str)
FILESYSTEM_REPORT = Name("node-{:04d}.json", int)


def fact_name(iteration: int, rank: int, status: str = "done", call: str = "") -> str:
    """The name of a node's fact. `call`: what it called, where that is part of the name (`Row.call_key`)."""
    if call and status == "done":
        return CALL_FACT.build(iteration, rank, call)
    return FACT.build(iteration, rank, status)


# --- claims on tasks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class ClaimsName:
    """The folder of the claims on the tasks of one split in one iteration."""

    split: str
    iteration: int


@dataclass(frozen=True, slots=True, order=True)
class LotName:
    """Lot `number` of the tasks that were assigned to node `rank`."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True, order=True)
class RoundDoneName:
    """Node `rank` has nothing left to do in a round of the phase, and so many of its groups in it have signal."""

    rank: int
    round: int
    with_signal: int


CLAIMS_FOLDER = Name("claims-{:s}.iter-{:06d}", ClaimsName)
LOT = Name("lot-{:04d}-{:06d}", LotName)
DURABLE_COUNT = Name("durable-{:04d}", int)
ROUND_DONE = Name("done-{:04d}-{:04d}-{:06d}", RoundDoneName)
#: there once a rollout phase is to end before its last few groups
CUT = "cut"

# --- trajectories --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryName:
    """A file of trajectories: of one node rank, or (`rank` None) merged from all of them."""

    split: str
    iteration: int
    rank: int | None = None
    generation: int | None = None
    incarnation: int | None = None


def _merged_by(split: str, iteration: int, generation: int) -> TrajectoryName:
    return TrajectoryName(split, iteration, generation=generation)


TRAJECTORIES_FOLDER = Name("{:s}_trajectories", str)
MERGED = Name("{:s}_trajectories.pt.iteration{:d}", TrajectoryName)
MERGED_BY = Name(f"{MERGED.template}.g{{:04d}}", _merged_by)
#: a file that only the program after which this one was modelled leaves, beside the rank's checkpoint
RANK_FALLBACK = Name(f"{MERGED.template}_rank_{{:d}}", TrajectoryName)
RANK_CHECKPOINT = Name(f"{RANK_FALLBACK.template}.checkpoint", TrajectoryName)
PART = Name(f"{RANK_CHECKPOINT.template}.g{{:04d}}i{{:04d}}.part", TrajectoryName)


def parse_trajectories(name: str) -> TrajectoryName | None:
    """What a file of trajectories is, whether merged, a rank's checkpoint, or one of its parts."""
    kinds = (MERGED, MERGED_BY, RANK_FALLBACK, RANK_CHECKPOINT, PART)
    return next((found for kind in kinds if (found := kind.parse(name)) is not None), None)


# --- checkpoints, logs, events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class MadeBy:
    """A policy version, or the batch of an iteration, as one generation made it."""

    number: int
    generation: int


@dataclass(frozen=True, slots=True, order=True)
class DebugAnswerName:
    """What the daemon of node `rank` answered to the request for debugging of this key."""

    key: str
    rank: int


POLICY_FOLDER = Name("policy-{:06d}.g{:04d}", MadeBy)
BATCH = Name("batch-{:06d}.g{:04d}.pt", MadeBy)
ATTEMPT_FOLDER = Name("attempt_{:d}", int)
NODE_FOLDER = Name("node_{:d}", int)
DEBUG_ANSWER = Name("{:s}.node-{:04d}.txt", DebugAnswerName)
JOURNAL = Name("node_{:d}.inc-{:04d}.jsonl", StartName)
