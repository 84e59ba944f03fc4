"""Types of settings with their limits. resolve.py translates them for pydantic, scripts/settings_doc.py for the documentation."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a value: > `gt`, >= `ge`, < `lt`, <= `le`, and a minimum length."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    min_length: int | None = None


@dataclass(frozen=True, slots=True)
class ShellWords:
    """The user may write the setting as a string or as a list of words; `convert` turns either into the stored form."""

    convert: Callable[[object], object]


def _split_words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _split_names(value: object) -> object:
    return tuple(name for name in re.split(r"[,\s]+", value) if name) if isinstance(value, str) else value


def _join_words(value: object) -> object:
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return shlex.join(value)
    return value


def reward_kinds(kind: str) -> list[str]:
    """The rewards listed in `reward.kind`."""
    return [one.strip() for one in kind.split(",")]


def json_or_text(word: str) -> object:
    try:
        value: object = json.loads(word)
    except ValueError:
        return word
    return value


Count = Annotated[int, Bounds(ge=1)]
Nodes = Annotated[int, Bounds(ge=1, le=100_000)]
CountOrZero = Annotated[int, Bounds(ge=0)]
Seconds = Annotated[float, Bounds(gt=0)]
Positive = Annotated[float, Bounds(gt=0)]
NotNegative = Annotated[float, Bounds(ge=0)]
Fraction = Annotated[float, Bounds(gt=0, le=1)]
FractionOrZero = Annotated[float, Bounds(ge=0, le=1)]
Decay = Annotated[float, Bounds(ge=0, lt=1)]
Name = Annotated[str, Bounds(min_length=1)]
Words = Annotated[tuple[str, ...], ShellWords(_split_words)]
Names = Annotated[tuple[str, ...], ShellWords(_split_names)]
CommandLine = Annotated[str, ShellWords(_join_words), Bounds(min_length=1)]
Weights = tuple[Positive, ...]
Numbers = tuple[float, ...]
Betas = tuple[Decay, Decay]
Trackers = Annotated[
    tuple[Literal["wandb", "tensorboard", "mlflow"], ...],
    ShellWords(_split_names),
]
RlPhase = Literal["rollout", "update", "both"]
Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rft",
]
