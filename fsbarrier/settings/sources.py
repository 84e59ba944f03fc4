"""Parses flags, `key=value` words and TOML files into ChosenValue, which remembers the source. Does not validate.

Values use TOML syntax (numbers, true/false, "text", [lists]). A bare word is text, and a list may omit its brackets.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.settings.placement import ROLES
from fsbarrier.settings.section import leaves
from fsbarrier.settings.value_types import Kind

#: The settings that are flags too, each with the metavar of its value and its help. The setting defines its type and meaning.
RUN_FLAGS = {
    "--data-path --data P": "read-only shared data: train and test as .jsonl or .parquet, and a model cache; or hf:ORG/NAME",
    "--log-path P": "the run directory, the same on all nodes (default: $FSBARRIER_LOG_PATH, else runs/default)",
    "--model M": "Hugging Face model: a folder, or a name in the data path or the local cache",
    "--download": "fetch a model ORG/NAME, or tasks hf:ORG/NAME, that are not in the local cache from the Hugging Face Hub",
    "--program NAME|FILE.py": "the program of an iteration: rl (default), sft, toy, ping, or your own file",
    "--rl-phase rollout|update|both": "run phases 0-6, 7-13, or all (default)",
    "--rollout-split train-only|eval-only": "with --rl-phase rollout: only the training rollout, or only the evaluation",
    "--eval-interval N": "evaluate when iteration %% N == 1 (default 1: every iteration; 0: never)",
    "--num-nodes --nodes N|A:B": "number of nodes (default 1); A:B: start with at least A, admit up to B, end the run below A",
    "--rank-weights w0,w1,...": "one positive weight per node: its share of the tasks (default: equal)",
    "--min-nodes M": "end the run with exit code 5 when fewer nodes are left (default 1)",
    "--expect-gpus N": "refuse to start if all nodes together have fewer accelerators; names the nodes that lack them",
    "--allow-idle": "start although the placement leaves accelerators without a role",
    "--on-node-failure shrink|wait|abort": "continue with the other nodes (default), wait for the node, or end the run",
    "--iterations N": "stop after iteration N (default: run until stopped)",
    "--epochs N": "stop after N passes over the training tasks, instead of --iterations",
    "--debug-mode": "do not start or stop vLLM; use the server that is already running (engine.url)",
    "--shared-group": "give the owner's group read and write access to the run directory",
    "--trust-mount": "trust a mount that sets all modes itself, as Azure Files does: nobody else can write to its export",
}
#: their names
FLAGS = tuple(flag.split()[0] for flag in RUN_FLAGS)
#: begins the data path if the tasks are a data set on the Hugging Face Hub
DATA_ON_HUB = "hf:"
#: flags of `run` that are no settings
NODE_FLAGS = ("--master", "--worker", "--demo", "--dry-run", "--resume", "--config")


def setting_of(flag: str) -> str:
    """The setting that a flag gives: `data_path` for `--data-path`."""
    return flag[2:].replace("-", "_")


#: tables of tables, keyed by names that the user chooses
SETS, TRAIN_SETS, ENGINES, ENVIRONMENTS = TABLES = "eval.sets", "train.sets", "engines", "environments"
SET_NAME, TRAIN_SET_NAME, ENGINE_NAME, ENVIRONMENT_NAME = (f"{table}.NAME" for table in TABLES)


def known_as(key: str) -> str:
    """The canonical name of a setting: `eval.sets.NAME.samples` for `eval.sets.aime.samples`, `eval.sets` for `eval.sets.aime`."""
    table = table_of(key)
    _, dot, leaf = key.removeprefix(f"{table}.").partition(".")
    return key if table is None else f"{table}.NAME.{leaf}" if dot else table


def table_of(key: str) -> str | None:
    """The table of tables that a setting belongs to; None for any other setting."""
    return next((table for table in TABLES if key.startswith(f"{table}.")), None)


def name_in(key: str) -> str:
    """The name of the set, engine or environment that a setting belongs to; "" for any other setting."""
    table = table_of(key)
    return key.removeprefix(f"{table}.").partition(".")[0] if table else ""


def stored_as(key: str) -> str:
    """The name under which a setting is stored: `engines.judge.placement` for `placement.judge`."""
    group, dot, name = key.partition(".")
    engine = group == "placement" and dot and "." not in name and name not in ROLES
    return f"{ENGINES}.{name}.placement" if engine else key


@dataclass(frozen=True, slots=True)
class ChosenValue:
    """A value that the user chose: its dotted name, the value, and its source as shown in messages."""

    key: str
    value: object
    source: str

    @property
    def is_flag(self) -> bool:
        return self.source.startswith("--")

    def written(self, value: str) -> str:
        """`value` as the user would write it in the same place: `--flag value` or `key=value`."""
        return f"{self.source} {value}" if self.is_flag else f"{self.source}={value}"


def parse_text(text: str, kind: Kind | None) -> object:
    """Parses `text` for a setting of this kind; `kind=None`: free-form."""
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
        # Not TOML, nested too deeply, or a number with thousands of digits.
        return text


def from_words(words: Iterable[str], known: Mapping[str, Kind]) -> list[ChosenValue]:
    """Parses `key=value` words. Raises UsageError for a word without a name or without `=`."""
    chosen: list[ChosenValue] = []
    for word in words:
        key, equals, text = word.partition("=")
        written, key = key.strip(), stored_as(key.strip())
        if not equals or not key:
            near = "" if known_as(key) in known else nearest(f"--{word.lstrip('-')}", (*FLAGS, *NODE_FLAGS))
            hint = near or "; settings are written key=value"
            raise UsageError(f"unexpected argument {word!r}{hint}")
        value = parse_text(text, known.get(known_as(key)))
        try:
            chosen += [
                ChosenValue(name, leaf, written if name == key else name)
                for name, leaf in leaves({key: value})
            ]
        except ValueError as error:
            raise UsageError(str(error)) from None
    return chosen


def from_flags(flags: Mapping[str, str | bool | None], known: Mapping[str, Kind]) -> list[ChosenValue]:
    """Parses flags, a mapping of flag to text (True for a flag without a value). None and False mean "not given"."""
    chosen = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        key = setting_of(flag)
        chosen.append(ChosenValue(key, value if value is True else parse_text(value, known[key]), flag))
    return chosen


def from_file(path: Path) -> list[ChosenValue]:
    """Reads a TOML file, with tables as dotted names. Raises UsageError naming file and line."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        # An empty table says nothing, unless it is of a set.
        values = [(key, value) for key, value in leaves(content) if value != {} or name_in(key)]
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path}: is not text in UTF-8") from None
    except RecursionError:
        raise UsageError(f"--config {path}: not TOML: nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None
    return [ChosenValue(stored_as(key), value, f"{path}: {key}") for key, value in values]


#: `coordination.last_call_s` for a run with `--num-nodes A:B`
LAST_CALL_S = 10.0


def with_range_of_nodes(chosen: Iterable[ChosenValue]) -> tuple[ChosenValue, ...]:
    """Expands `--num-nodes A:B` into the settings it stands for. Raises UsageError."""
    items = tuple(chosen)
    by_key = {item.key: item for item in items}
    nodes, fewest = by_key.get("num_nodes"), by_key.get("min_nodes")
    if nodes is None or not isinstance(nodes.value, str) or ":" not in nodes.value:
        return items
    least, most = (text.strip() for text in nodes.value.split(":", 1))
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise UsageError(
            f"{nodes.written(nodes.value)}: give A:B as minimum and maximum number of nodes, such as 2:8"
        )
    if fewest is not None:
        raise UsageError(
            f"{nodes.written(nodes.value)}: already sets the minimum number of nodes; drop {fewest.source}"
        )
    values = {"min_nodes": int(least), "coordination.last_call_s": LAST_CALL_S}
    stands_for = [ChosenValue(key, value, nodes.source) for key, value in values.items()]
    return (*stands_for, *items, replace(nodes, value=int(most)))


def nearest(name: str, names: Iterable[str]) -> str:
    """ "; did you mean X?" with the known name most similar to `name`, or an empty string."""
    candidates = list(names)
    if name.startswith("-"):
        # Compare flags without their hyphens, with which all of them begin.
        bare = {each.lstrip("-"): each for each in candidates if each.startswith("-")}
        close = difflib.get_close_matches(name.lower().lstrip("-"), list(bare), n=1, cutoff=0.6)
        return f"; did you mean {bare[close[0]]}?" if close else ""
    lowered = name.lower().replace("-", "_")
    leaf = lowered.rpartition(".")[2]
    # The right name, perhaps in the wrong section.
    alike = [each for each in candidates if each.rpartition(".")[2] == leaf and ".NAME." not in each][:3]
    alike = alike or difflib.get_close_matches(lowered, candidates, n=1, cutoff=0.6)
    if not alike:
        leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(candidates)}
        alike = [leaves[close] for close in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)]
    return f"; did you mean {' or '.join(alike)}?" if alike else ""
