"""What a person chose, and where: flags, `key=value` words and TOML files become ChosenValue. No rules here, and no pydantic.

A value is written as in TOML (numbers, true/false, "text", [lists]); a bare word is text, and a list may go
without its brackets.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from fsbarrier.errors import UsageError

#: Flag -> setting. What a flag takes and what it means is the setting's.
FLAGS = {
    "--data-path": "data_path",
    "--log-path": "log_path",
    "--model": "model",
    "--program": "program",
    "--rl-phase": "rl_phase",
    "--rollout-split": "rollout_split",
    "--eval-interval": "eval_interval",
    "--num-nodes": "num_nodes",
    "--rank-weights": "rank_weights",
    "--min-nodes": "min_nodes",
    "--expect-gpus": "expect_gpus",
    "--on-node-failure": "on_node_failure",
    "--rejoin-timeout": "coordination.rejoin_timeout_s",
    "--iterations": "iterations",
    "--debug-mode": "debug_mode",
    "--shared-group": "shared_group",
}


#: a table of tables: the name of a set is the user's own
SETS = "eval.sets"
SET_NAME = f"{SETS}.NAME"


def known_as(key: str) -> str:
    """The name under which a setting is known: `eval.sets.aime.samples` is `eval.sets.NAME.samples`, and `eval.sets.aime` a part of
    `eval.sets`."""
    below = key.removeprefix(f"{SETS}.")
    if below == key:
        return key
    _, dot, leaf = below.partition(".")
    return f"{SET_NAME}.{leaf}" if dot else SETS


def set_in(key: str) -> str:
    """The name of the set of held-out tasks that a setting belongs to; "" for any other setting."""
    return key.removeprefix(f"{SETS}.").partition(".")[0] if key.startswith(f"{SETS}.") else ""


@dataclass(frozen=True, slots=True)
class ChosenValue:
    """One value that somebody chose: the dotted name, the value, and how to name its source in a message."""

    key: str
    value: object
    source: str

    @property
    def is_flag(self) -> bool:
        return self.source.startswith("--")

    def written(self, value: str) -> str:
        """`value` as the person would write it in the same place: `--flag value` or `key=value`."""
        return f"{self.source} {value}" if self.is_flag else f"{self.source}={value}"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a setting is written as text: "text", "words", "list", "bool" or "value"; `optional`: or `none`."""

    shape: str
    optional: bool = False


def parse_text(text: str, kind: Kind | None) -> object:
    """The value that `text` stands for, for a setting of this kind; None for `kind`: free-form."""
    shape = kind.shape if kind else "free"
    stripped = text.strip()
    if (kind is None or kind.optional) and stripped.lower() in ("none", "null"):
        return None
    if shape in ("text", "words") and stripped[:1] not in ('"', "'", "["):
        return text
    if shape == "text" and stripped[:1] == "[":
        return text
    if shape == "bool" and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if shape == "list" and not stripped.startswith("["):
        stripped = f"[{stripped}]"
    try:
        return tomllib.loads(f"value = {stripped}")["value"] if "\n" not in stripped else text
    except (ValueError, RecursionError):
        # No TOML, nested too deeply, or a number of thousands of digits.
        return text


def from_words(words: Iterable[str], known: Mapping[str, Kind]) -> list[ChosenValue]:
    """`key=value` words. Raises UsageError for a word without a name and `=`."""
    found = []
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key:
            near = "" if known_as(key) in known else nearest(f"--{word.lstrip('-')}", FLAGS)
            hint = near or "; settings are written key=value"
            raise UsageError(f"unexpected argument {word!r}{hint}")
        found.append(ChosenValue(key, parse_text(text, known.get(known_as(key))), key))
    return found


def from_flags(flags: Mapping[str, str | bool | None], known: Mapping[str, Kind]) -> list[ChosenValue]:
    """Flag -> text (or True for a flag that takes none); None and False stand for "not given"."""
    found = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        key = FLAGS[flag]
        found.append(ChosenValue(key, value if value is True else parse_text(value, known[key]), flag))
    return found


def from_file(path: Path, known: Mapping[str, Kind]) -> list[ChosenValue]:
    """The settings of a TOML file, tables as dotted names. Raises UsageError naming file and line."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path}: is not text in UTF-8") from None
    except RecursionError:
        raise UsageError(f"--config {path}: not TOML: nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None
    return [ChosenValue(key, value, f"{path}: {key}") for key, value in flatten(content, known).items()]


#: of a run with `--num-nodes A:B`: `coordination.last_call_s`
LAST_CALL_S = 10.0


def with_range_of_nodes(chosen: Iterable[ChosenValue]) -> tuple[ChosenValue, ...]:
    """`--num-nodes A:B` as the settings that it stands for. Raises UsageError."""
    items = tuple(chosen)
    by_key = {item.key: item for item in items}
    nodes, fewest = by_key.get("num_nodes"), by_key.get("min_nodes")
    if nodes is None or not isinstance(nodes.value, str) or ":" not in nodes.value:
        return items
    least, most = (text.strip() for text in nodes.value.split(":", 1))
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise UsageError(f"{nodes.written(nodes.value)}: A:B is the least and the most nodes, such as 2:8")
    if fewest is not None:
        raise UsageError(f"{nodes.written(nodes.value)}: says the least nodes already; drop {fewest.source}")
    values = {"min_nodes": int(least), "coordination.last_call_s": LAST_CALL_S}
    stands_for = [ChosenValue(key, value, nodes.source) for key, value in values.items()]
    return (*stands_for, *items, replace(nodes, value=int(most)))


def flatten(content: Mapping[str, object], known: Collection[str]) -> dict[str, object]:
    """Nested tables as dotted names; a table that is itself a setting's value stays whole, save `custom`."""
    flat: dict[str, object] = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and (name not in known or name == "custom"):
            flat.update({f"{name}.{leaf}": inner for leaf, inner in value.items()})
        else:
            flat[name] = value
    # The sets are taken apart into single settings, so that another source may change one of them.
    sets = flat.get(SETS)
    if _holds_tables(sets) and sets:
        del flat[SETS]
        for name, table in sets.items():
            leaves = {f"{SETS}.{name}.{leaf}": inner for leaf, inner in table.items()}
            flat |= leaves or {f"{SETS}.{name}": table}
    return flat


def _holds_tables(value: object) -> TypeGuard[Mapping[str, Mapping[str, object]]]:
    return isinstance(value, Mapping) and all(isinstance(inner, Mapping) for inner in value.values())


def nearest(name: str, names: Iterable[str]) -> str:
    """The words "; did you mean X?" for the known name most like `name`, or an empty string."""
    candidates = list(names)
    lowered = name.lower() if name.startswith("-") else name.lower().replace("-", "_")
    found = [one for one in candidates if one.rpartition(".")[2] == lowered and SET_NAME not in one][:3]
    found = found or difflib.get_close_matches(lowered, candidates, n=1, cutoff=0.6)
    if not found:
        # The right name in the wrong section.
        leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(candidates)}
        leaf = lowered.rpartition(".")[2]
        found = [leaves[close] for close in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)]
    return f"; did you mean {' or '.join(found)}?" if found else ""
