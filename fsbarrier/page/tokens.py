"""The tokens of a trajectory as coloured pieces of text. Pure, but for reading the tokenizer.

The background says how unlikely a token was, or how far two opinions of it are apart; tokens that are masked from the loss have none.
"""

from __future__ import annotations

import importlib.util
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsbarrier.store import reading

#: tokens on a page, and bytes of a tokenizer's file
MOST_TOKENS, TOKENIZER_BYTES = 3000, 256 << 20
#: a log-probability of this many nats, or a difference of so many, has the full colour
FULL_LOGPROB, FULL_GAP = 5.0, 1.0
ORANGE, BLUE = "213,94,0", "0,114,178"

#: the text of a token
TextOf = Callable[[int], str]


class Span(NamedTuple):
    """One token: its text, its style, what it says when pointed at; `off`: masked from the loss; `peak`: the most extreme one."""

    text: str
    style: str
    title: str
    off: bool
    peak: bool


#: what tokens can be coloured by: name -> how it is called
COLOURS: Mapping[str, str] = {
    "logprob": "log-probability when sampled",
    "teacher": "gap to the teacher",
    "version": "policy version",
}


def colours_of(trajectory: Mapping[str, Any]) -> list[str]:
    """The colourings for which the trajectory has values."""
    fields = {"logprob": "logprobs", "teacher": "teacher_logprobs", "version": "policy_versions"}
    return [name for name, field in fields.items() if len(_numbers(trajectory, field))]


def spans(trajectory: Mapping[str, Any], colour: str, first: int, text_of: TextOf) -> list[Span]:
    """The tokens from `first` on, at most MOST_TOKENS."""
    ids = _numbers(trajectory, "token_ids")
    mask = _padded(_numbers(trajectory, "loss_mask"), len(ids), 0)
    values = _values(trajectory, colour, len(ids))
    peak = peak_of(trajectory, colour)
    tokens = []
    for at in range(first, min(len(ids), first + MOST_TOKENS)):
        off, value = not mask[at], values[at]
        title = f"token {at}, id {int(ids[at])}" + (
            ", masked from the loss" if off else f", {value:.4f}" if value is not None else ""
        )
        style = "" if off or value is None else _style(colour, value)
        tokens.append(Span(text_of(int(ids[at])), style, title, off, at == peak))
    return tokens


def peak_of(trajectory: Mapping[str, Any], colour: str) -> int | None:
    """The sampled token that is least likely, or where the two opinions differ most; None without values."""
    ids = _numbers(trajectory, "token_ids")
    mask = _padded(_numbers(trajectory, "loss_mask"), len(ids), 0)
    values = _values(trajectory, colour, len(ids))
    known = [(abs(value), at) for at, value in enumerate(values) if value is not None and mask[at]]
    return max(known, key=lambda item: (item[0], -item[1]))[1] if known and colour != "version" else None


def _values(trajectory: Mapping[str, Any], colour: str, count: int) -> list[float | None]:
    sampled = _padded(_numbers(trajectory, "logprobs"), count, math.nan)
    if colour == "teacher":
        taught = _padded(_numbers(trajectory, "teacher_logprobs"), count, math.nan)
        return [_finite(a - b) for a, b in zip(sampled, taught, strict=True)]
    if colour == "version":
        versions = _padded(_numbers(trajectory, "policy_versions"), count, -1)
        oldest = min((version for version in versions if version >= 0), default=0)
        return [None if version < 0 else float(version - oldest) for version in versions]
    return [_finite(logprob) for logprob in sampled]


def _style(colour: str, value: float) -> str:
    full = FULL_GAP if colour == "teacher" else FULL_LOGPROB
    share = min(1.0, abs(value) / full)
    tint = BLUE if colour != "logprob" and value > 0 else ORANGE
    return f"background:rgba({tint},{0.85 * share:.2f})" if share >= 0.02 else ""


def _numbers(trajectory: Mapping[str, Any], name: str) -> Sequence[float]:
    value = trajectory.get(name)
    return value if isinstance(value, array) else ()


def _padded(values: Sequence[float], count: int, fill: float) -> list[float]:
    return [*values[:count], *([fill] * (count - len(values)))]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def text_of_tokens(models: Sequence[Path]) -> TextOf | None:
    """Decodes single tokens with the tokenizer of the first of these model folders that has one; None if that is not possible here."""
    if importlib.util.find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    for folder in models:
        try:
            data = reading.read_bytes((folder / "tokenizer.json").resolve(), TOKENIZER_BYTES)
            tokenizer = Tokenizer.from_buffer(data)
        # The library raises a bare Exception for a file that is not a tokenizer's.
        except Exception:
            continue
        return lambda number: str(tokenizer.decode([number], skip_special_tokens=False))
    return None
