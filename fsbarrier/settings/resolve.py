"""Every setting of a run: its name, type, default, limits and meaning. pydantic is imported in this room only.

Sources, later wins: the defaults below, the built-in task's, `--config FILE.toml`, flags, `key=value`. What
people give arrives as `Given` values (fsbarrier.settings.sources); `resolve` makes one checked, frozen whole of them.
docs/settings.md is generated from the descriptions: `python scripts/settings_doc.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field, ValidationError

from fsbarrier.errors import UsageError
from fsbarrier.settings.checks import check, one_line
from fsbarrier.settings.sections import (
    Algorithm,
    Checkpoint,
    Coordination,
    Count,
    Engine,
    Eval,
    Judge,
    Name,
    Nodes,
    Optimizer,
    Reward,
    Rollout,
    Section,
    Toy,
    Trainer,
    Update,
    Weights,
    setting,
)
from fsbarrier.settings.sources import Given, Kind, flatten, nearest


class Settings(Section):
    """A run's settings, complete."""

    data_path: Name | None = setting(
        None, "Folder with train and test as .jsonl or .parquet; none: the built-in task."
    )
    log_path: Name | None = setting(None, "The run directory, the same on all nodes.")
    model: Name | None = setting(
        None, "Hugging Face model folder, a folder below the data path, or a name in the local cache."
    )
    program: Name = setting("rl", "`rl`, `toy`, `ping`, or your own FILE.py.")
    rl_phase: Literal["rollout", "update", "both"] = setting("both", "Phases 0-6, 7-13, or all.")
    rollout_split: Literal["train-only", "eval-only"] | None = setting(
        None, "With `rl_phase=rollout`: only train rollouts, or only the evaluation; none: both."
    )
    eval_interval: Count = setting(1, "Evaluate when iteration % N == 1 (N = 1: every iteration).")
    num_nodes: Nodes = setting(1, "Nodes of the run.")
    rank_weights: Weights = setting(
        (1.0,), "One positive weight a node, its share of the tasks; not given: all equal."
    )
    min_nodes: Count = setting(1, "With fewer nodes left the run ends with exit code 5.")
    on_node_failure: Literal["shrink", "wait", "abort"] = setting(
        "shrink", "When a node is lost: go on with the others, hold the phase until it is back, or end."
    )
    debug_mode: bool = setting(False, "Do not manage vLLM: use the server that is there (`engine.url`).")
    iterations: Count | None = setting(
        None, "Do iterations up to this one; none: endless. Each start of node 0 may name another number."
    )
    shared_group: bool = setting(
        False, "Let the group read and write the run directory (0770, 0660), not only its owner."
    )
    rollout: Rollout = Field(default_factory=Rollout)
    eval: Eval = Field(default_factory=Eval)
    reward: Reward = Field(default_factory=Reward)
    judge: Judge = Field(default_factory=Judge)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    trainer: Trainer = Field(default_factory=Trainer)
    update: Update = Field(default_factory=Update)
    engine: Engine = Field(default_factory=Engine)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    coordination: Coordination = Field(default_factory=Coordination)
    toy: Toy = Field(default_factory=Toy)
    custom: dict[str, Any] = Field(
        default_factory=dict,
        description="Anything (`custom.name=value`), passed on to your own program, reward or trainer.",
    )


@dataclass(frozen=True)
class Resolved:
    """A run's settings as one whole. `nested` is what the record keeps; `given` says who chose what."""

    settings: Settings
    nested: Mapping[str, Any]
    given: Mapping[str, Given] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest(self.nested)


def digest(nested: Mapping[str, Any]) -> str:
    """SHA-256 of resolved settings in hexadecimal; where the run directory is mounted is no part of them."""
    relevant = {name: value for name, value in nested.items() if name != "log_path"}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sections() -> dict[str, type[Section]]:
    """The dotted groups, in order of their definition."""
    return {
        name: info.annotation
        for name, info in Settings.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
    }


def known_names() -> dict[str, Kind]:
    """Every dotted name with how its value is written as text; "custom" stands for all names below it."""
    names: dict[str, Kind] = {}
    groups = sections()
    for name, info in Settings.model_fields.items():
        if name in groups:
            for leaf, leaf_info in groups[name].model_fields.items():
                names[f"{name}.{leaf}"] = _kind(leaf_info.annotation, leaf_info.metadata)
        else:
            names[name] = _kind(info.annotation, info.metadata)
    return names


def _kind(annotation: Any, metadata: Iterable[Any] = ()) -> Kind:
    optional = type(None) in get_args(annotation)
    inner = get_args(annotation)[0] if optional else annotation
    traits = list(metadata)
    if get_origin(inner) is Annotated:
        traits += inner.__metadata__
        inner = get_args(inner)[0]
    if any(isinstance(trait, BeforeValidator) for trait in traits):
        return Kind("words", optional)
    if inner is str or get_origin(inner) is Literal:
        return Kind("text", optional)
    if get_origin(inner) is tuple:
        return Kind("list", optional)
    return Kind("bool" if inner is bool else "value", optional)


def resolve(
    given: Iterable[Given], defaults: Mapping[str, Any] | None = None, *, cross_checks: bool = True
) -> Resolved:
    """The settings that `defaults` (dotted names), then `given` make; later ones win. Raises UsageError."""
    chosen = {item.key: item for item in given}
    known = known_names()
    for item in chosen.values():
        _check_name(item, known)
    values = dict(defaults or {})
    values.update((key, item.value) for key, item in chosen.items())
    if "rank_weights" not in values and isinstance(values.get("num_nodes"), int):
        values["rank_weights"] = [1.0] * min(values["num_nodes"], 100_000)
    try:
        settings = Settings.model_validate(_nest(values))
    except ValidationError as error:
        raise UsageError(one_line(error.errors(include_url=False), known, chosen)) from None
    if cross_checks:
        check(settings, chosen)
    return Resolved(settings, settings.model_dump(mode="json"), chosen)


def from_nested(nested: Mapping[str, Any]) -> Settings:
    """The typed form of the settings in a record; names that this version does not know are left out."""
    return resolve((), as_defaults(nested), cross_checks=False).settings


def as_defaults(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A record's settings as dotted names, but for those that this version does not know."""
    known = known_names()
    return {
        key: value
        for key, value in flatten(nested, known).items()
        if key in known or key.startswith("custom.")
    }


def _check_name(item: Given, known: Mapping[str, Kind]) -> None:
    if item.key in known or (item.key.startswith("custom.") and item.key != "custom."):
        return
    if item.key in sections():
        inside = ", ".join(name for name in known if name.startswith(f"{item.key}."))
        raise UsageError(f"{item.source}: {item.key} is a group of settings: {inside}")
    raise UsageError(f"{item.source}: unknown setting{nearest(item.key, known)}")


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *tables, name = key.split(".")
        inner = nested
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{key}: {table} is a value, so it has nothing inside")
        inner[name] = value
    return nested
