"""From what people chose to one checked, frozen `Settings`.

Sources, later wins: the defaults in sections.py, what the caller puts below everything chosen (the built-in task's settings, timeouts
that fit the filesystem), `--config FILE.toml`, flags, `key=value`. What people chose arrives as ChosenValue (sources.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, ValidationError

from fsbarrier.errors import UsageError
from fsbarrier.settings.checks import check, one_line
from fsbarrier.settings.sections import Section, Settings
from fsbarrier.settings.sources import ChosenValue, Kind, flatten, nearest


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
    chosen: Iterable[ChosenValue], defaults: Mapping[str, Any] | None = None, *, cross_checks: bool = True
) -> Settings:
    """The settings that `defaults` (dotted names), then `chosen` make; later ones win. Raises UsageError.

    `cross_checks` False: what must hold between settings is left alone, because some are not known yet.
    """
    by_key = {item.key: item for item in chosen}
    known = known_names()
    for item in by_key.values():
        _check_name(item, known)
    values = {**(defaults or {}), **{key: item.value for key, item in by_key.items()}}
    if "rank_weights" not in values and isinstance(values.get("num_nodes"), int):
        # A mistyped number of nodes must not fill the memory before it is refused.
        values["rank_weights"] = [1.0] * min(values["num_nodes"], 100_000)
    settings = _validated(values, known, by_key)
    if cross_checks:
        check(settings, by_key)
    return settings


def from_record(nested: Mapping[str, Any]) -> Settings:
    """The settings that a run's record holds.

    The record may be of another version: names that this one does not know are left out, and what the record does not know has its
    default. Raises UsageError for a value that this version does not take.
    """
    known = known_names()
    values = {
        key: value
        for key, value in flatten(nested, known).items()
        if key in known or key.startswith("custom.")
    }
    return _validated(values, known, {})


def _validated(
    values: Mapping[str, Any], known: Mapping[str, Kind], chosen: Mapping[str, ChosenValue]
) -> Settings:
    try:
        return Settings.model_validate(_nest(values))
    except ValidationError as error:
        raise UsageError(one_line(error.errors(include_url=False), known, chosen)) from None


def _check_name(item: ChosenValue, known: Mapping[str, Kind]) -> None:
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
