"""Types of settings with their limits, and how they are written and described."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from fsbarrier.settings.section import Changes


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
    return [word.strip() for word in kind.split(",")]


#: the prefix of a frozen engine's name in `reward.kind` and `judge.model`
ENGINE = "engines."
#: the frozen engine that teaches (`algorithm.loss=distil`)
TEACHER = "teacher"
#: the arguments by which chat templates switch thoughts on and off
SWITCHES = ("enable_thinking", "thinking")


def frozen_engine(named: str | None) -> str | None:
    """The NAME in `engines.NAME`; None for any other text."""
    return named.removeprefix(ENGINE) if named is not None and named.startswith(ENGINE) else None


def scoring_engines(kind: str) -> list[str]:
    """The frozen engines among the rewards listed in `reward.kind`."""
    return [name for reward in reward_kinds(kind) if (name := frozen_engine(reward)) is not None]


def json_or_text(word: str) -> object:
    try:
        value: object = json.loads(word)
    except ValueError:
        return word
    return value


Count = Annotated[int, Meta(ge=1)]
Nodes = Annotated[int, Meta(ge=1, le=100_000)]
CountOrZero = Annotated[int, Meta(ge=0)]
OneOrZero = Annotated[int, Meta(ge=0, le=1)]
ZeroStage = Annotated[int, Meta(ge=1, le=3)]
TopK = Annotated[int, Meta(ge=-1)]
Seconds = Annotated[float, Meta(gt=0)]
Positive = Annotated[float, Meta(gt=0)]
AboveOne = Annotated[float, Meta(gt=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
FractionOrZero = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Name = Annotated[str, Meta(min_length=1)]
Words = Annotated[tuple[str, ...], ShellWords(_split_words)]
Names = Annotated[tuple[str, ...], ShellWords(_split_names)]
CommandLine = Annotated[str, ShellWords(_join_words), Meta(min_length=1)]
Weights = tuple[Positive, ...]
Numbers = tuple[float, ...]
Betas = tuple[Decay, Decay]
Trackers = Annotated[
    tuple[Literal["wandb", "tensorboard", "mlflow"], ...],
    ShellWords(_split_names),
]
RlPhase = Literal["rollout", "update", "both"]


#: the largest whole number that every reader of JSON holds exactly
LARGEST = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting accepts: what a value must be (`hint`), its text format ("text", "words", "list", "bool" or "value"), whether `none`
    is allowed too, its default, and whether it may change."""

    hint: Any
    shape: str
    optional: bool = False
    default: object = None
    changes: Changes = Changes.NEVER

    @classmethod
    def of(cls, hint: Any, default: object) -> Kind:
        """Make a Kind from a setting's annotation and its default."""
        whole, *traits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        changes = next((trait for trait in traits if isinstance(trait, Changes)), Changes.NEVER)
        optional = NoneType in get_args(whole)
        if optional:
            hint = whole
            whole, *traits = (
                get_args(inner) if get_origin(inner := get_args(whole)[0]) is Annotated else (inner,)
            )
        if any(isinstance(trait, ShellWords) for trait in traits):
            shape = "words"
        elif whole is str or get_origin(whole) is Literal:
            shape = "text"
        else:
            shape = "list" if get_origin(whole) is tuple else "bool" if whole is bool else "value"
        return cls(hint, shape, optional, default, changes)

    def converted(self, value: object) -> object:
        """The value as its setting holds it. Raises ValueError that says what the value must be."""
        inner = get_args(self.hint)[0] if self.optional else self.hint
        for trait in get_args(inner)[1:] if get_origin(inner) is Annotated else ():
            value = trait.convert(value) if isinstance(trait, ShellWords) else value
        items = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, float) and not math.isfinite(item) for item in items):
            raise ValueError("must be a finite number")
        if any(isinstance(item, int) and abs(item) > LARGEST for item in items):
            raise ValueError(f"must be at most {LARGEST:,}")
        try:
            # Dates and times of TOML become text.
            plain = msgspec.to_builtins(value)
            msgspec.convert(plain, self.hint)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"must be {described(self.hint).replace('`', '')}") from None
        return plain


def described(hint: Any) -> str:
    """Describe in a few words what a setting accepts: type and limits."""
    inner = get_args(hint)
    if NoneType in inner:
        return described(inner[0]) + ", or none"
    if get_origin(hint) is Annotated:
        limits = [phrase for trait in inner[1:] if isinstance(trait, Meta) for phrase in _limits(trait)]
        return f"{described(inner[0])} {' and '.join(limits)}".rstrip()
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f"`{item}`" for item in inner)
    if get_origin(hint) is tuple:
        count = "a list of " if inner[-1] is Ellipsis else f"{len(inner)} "
        item = described(inner[0]).removeprefix("one of ").removeprefix("a ")
        return count + item.replace("number", "numbers").replace("text", "words")
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Mapping: "a table"}
    return names[get_origin(hint) or hint]


def _limits(limit: Meta) -> list[str]:
    words = {"gt": "> {:g}", "ge": "≥ {:g}", "lt": "< {:g}", "le": "≤ {:g}"}
    bounds = {name: getattr(limit, name) for name in words}
    phrases = [words[name].format(bound) for name, bound in bounds.items() if bound is not None]
    return phrases + (["that is not empty"] if limit.min_length else [])
