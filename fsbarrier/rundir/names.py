"""Builds and parses every name under the run directory.

A kind of name is one template: `GENERATION.build(12)` is "gen-000012.json", and `GENERATION.parse("gen-000012.json")` is 12.
Any other name in a directory (an editor's backup, a temporary file) parses as None, and readers skip it. rundir/paths.py has the places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Generic, TypeVar

from fsbarrier.protocol.facts import Pulse

T = TypeVar("T")

SPLITS = ("train", "test")

# Longer numbers are not ours, and Python refuses to parse thousands of digits.
_MOST_DIGITS = 18


class Name(Generic[T]):
    """One kind of name. The template's fields are numbers (`{:d}`, or `{:06d}` with leading zeros) and words (`{:s}`)."""

    def __init__(self, template: str, meaning: Callable[..., T]) -> None:
        """`meaning` makes the result of `parse` from the fields, in the template's order."""
        self.template, self._meaning = template, meaning
        fields = [(literal, spec) for literal, _, spec, _ in Formatter().parse(template)]
        groups = [re.escape(literal) + _group(spec or "") for literal, spec in fields]
        self._pattern = re.compile("".join(groups), re.ASCII)
        self._types = [str if spec == "s" else int for _, spec in fields if spec]
        # A waiting node lists the same directories many times a second, and parses the same names each time.
        self.build: Callable[..., str] = lru_cache(maxsize=4096)(template.format)
        self.parse: Callable[[str], T | None] = lru_cache(maxsize=4096)(self._parse)

    def _parse(self, name: str) -> T | None:
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        return self._meaning(*(read(text) for read, text in zip(self._types, match.groups(), strict=True)))

    def parse_all(self, names: Iterable[str]) -> list[T]:
        """The meanings of all names of this kind; other names are skipped."""
        return [meaning for name in names if (meaning := self.parse(name)) is not None]


def _group(spec: str) -> str:
    """The pattern of a field, which matches exactly what `build` writes; "gen-12.json" does not match."""
    if spec in ("", "s"):
        return r"(\w+)" if spec else ""
    width = int(spec[:-1] or 1)
    return rf"(\d{{{width}}}|[1-9]\d{{{width},{_MOST_DIGITS - 1}}})"


# --- coordination/ ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class StartName:
    """One start of a node; the name of its files in joins/ and status/."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, order=True)
class PhaseName:
    """The folder of one row of the program."""

    index: int
    name: str


@dataclass(frozen=True, slots=True, order=True)
class FactName:
    """A node's fact about its row: "done" or "failed"."""

    iteration: int
    rank: int
    status: str


START = Name("node-{:04d}.inc-{:04d}.json", StartName)
#: a heartbeat
PULSE = Name("node-{:04d}.inc-{:04d}.beat-{:d}.{:s}.gen-{:06d}.iter-{:06d}.p{:02d}", Pulse)
GENERATION = Name("gen-{:06d}.json", int)
GENERATION_FOLDER = Name("gen-{:06d}", int)
PHASE_FOLDER = Name("p{:02d}-{:s}", PhaseName)
FACT = Name("iter-{:06d}.node-{:04d}.{:s}", FactName)
STOP_REQUEST = Name("{:06d}.json", int)


def fact_name(iteration: int, rank: int, status: str = "done") -> str:
    """The name of a node's fact."""
    return FACT.build(iteration, rank, status)


# --- claims on tasks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class ClaimsName:
    """The folder of the claims on the tasks of one split in one iteration."""

    split: str
    iteration: int


@dataclass(frozen=True, slots=True, order=True)
class LotName:
    """Lot `number` of the tasks in the share of node `rank`."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True, order=True)
class RoundDoneName:
    """Node `rank` is done with a round of the phase; `with_signal` of its groups have signal."""

    rank: int
    round: int
    with_signal: int


@dataclass(frozen=True, slots=True, order=True)
class SessionsName:
    """Node `rank` needs at most `need` sessions of an environment at a time in the rest of a round."""

    rank: int
    environment: int
    round: int
    need: int


CLAIMS_FOLDER = Name("claims-{:s}.iter-{:06d}", ClaimsName)
LOT = Name("lot-{:04d}-{:06d}", LotName)
DURABLE_COUNT = Name("durable-{:04d}", int)
ROUND_DONE = Name("done-{:04d}-{:04d}-{:06d}", RoundDoneName)
SESSIONS = Name("sessions-{:04d}-{:04d}-{:04d}-{:06d}", SessionsName)
#: a file that exists once a rollout phase shall end before its last few groups
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
    policy_version: int | None = None


def _merged_by(split: str, iteration: int, generation: int) -> TrajectoryName:
    return TrajectoryName(split, iteration, generation=generation)


TRAJECTORIES_FOLDER = Name("{:s}_trajectories", str)
#: the images of one iteration
IMAGES_FOLDER = Name("{:s}_images.iteration{:d}", TrajectoryName)
MERGED = Name("{:s}_trajectories.pt.iteration{:d}", TrajectoryName)
MERGED_BY = Name(f"{MERGED.template}.g{{:04d}}", _merged_by)
RANK_CHECKPOINT = Name(f"{MERGED.template}_rank_{{:d}}.checkpoint", TrajectoryName)
#: A part has one writer, generation and policy version, since the next iteration's rollouts may be made with the policy before.
PART = Name(f"{RANK_CHECKPOINT.template}.g{{:04d}}i{{:04d}}v{{:06d}}.part", TrajectoryName)


def parse_trajectories(name: str) -> TrajectoryName | None:
    """The meaning of a trajectory file's name: merged, a rank's checkpoint, or a part."""
    kinds = (MERGED, MERGED_BY, RANK_CHECKPOINT, PART)
    return next((parsed for kind in kinds if (parsed := kind.parse(name)) is not None), None)


# --- checkpoints, logs, events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class MadeBy:
    """A policy version, or the batch of an iteration, and the generation that made it."""

    number: int
    generation: int


POLICY_FOLDER = Name("policy-{:06d}.g{:04d}", MadeBy)
BATCH = Name("batch-{:06d}.g{:04d}.pt", MadeBy)
ATTEMPT_FOLDER = Name("attempt_{:d}", int)
NODE_FOLDER = Name("node_{:d}", int)
JOURNAL = Name("node_{:d}.inc-{:04d}.jsonl", StartName)
