"""Merges and validates user input into one frozen `Settings`.

Precedence, lowest first: the defaults in sections.py, the caller's defaults (settings of the built-in task, timeouts that fit the
filesystem), `algorithm.preset`, `--config FILE.toml`, flags, `key=value`. User input arrives as ChosenValue (sources.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from types import GenericAlias, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from fsbarrier.errors import UsageError
from fsbarrier.settings.checks import check, one_line
from fsbarrier.settings.presets import preset_values
from fsbarrier.settings.section import Section
from fsbarrier.settings.sections import EvalSet, Settings, sections
from fsbarrier.settings.sources import SET_NAME, ChosenValue, Kind, known_as, nearest
from fsbarrier.settings.value_types import Bounds, ShellWords

# The name of an evaluation set becomes part of dotted names and of metric names.
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]

# --- known settings -----------------------------------------------------------------------------------------------------


def known_names() -> dict[str, Kind]:
    """Every dotted name with the text format of its value. "custom" covers all names below it, and NAME any name (see `known_as`)."""
    names: dict[str, Kind] = {}
    groups = sections()
    for name, hint in _hints(Settings).items():
        if name in groups:
            names |= {f"{name}.{leaf}": _kind(leaf_hint) for leaf, leaf_hint in _hints(groups[name]).items()}
        else:
            names[name] = _kind(hint)
    names |= {f"{SET_NAME}.{leaf}": _kind(hint) for leaf, hint in _hints(EvalSet).items()}
    return names


def _hints(section: type[Section]) -> dict[str, object]:
    return get_type_hints(section, include_extras=True)


def _kind(hint: object) -> Kind:
    optional, inner = NoneType in get_args(hint), hint
    if optional:
        inner = get_args(hint)[0]
    traits: list[object] = []
    if get_origin(inner) is Annotated:
        inner, *traits = get_args(inner)
    if any(isinstance(trait, ShellWords) for trait in traits):
        return Kind("words", optional)
    if inner is str or get_origin(inner) is Literal:
        return Kind("text", optional)
    if get_origin(inner) is tuple:
        return Kind("list", optional)
    return Kind("bool" if inner is bool else "value", optional)


# --- validation ---------------------------------------------------------------------------------------------------------


def resolve(
    chosen: Iterable[ChosenValue], defaults: Mapping[str, object] | None = None, *, cross_checks: bool = True
) -> Settings:
    """Merges `chosen` over `defaults` (by dotted name) and validates the result. Raises UsageError.

    `cross_checks=False` skips the checks between settings, for callers that do not know all of them yet.
    """
    by_key = {item.key: item for item in chosen}
    known = known_names()
    for item in by_key.values():
        _check_name(item, known)
    own = {key: item.value for key, item in by_key.items()}
    values = {**(defaults or {}), **preset_values(own.get("algorithm.preset")), **own}
    num_nodes = values.get("num_nodes")
    if "rank_weights" not in values and isinstance(num_nodes, int):
        # A mistyped number of nodes must not exhaust memory before validation rejects it.
        values["rank_weights"] = [1.0] * min(num_nodes, 100_000)
    settings = _validated(_nest(values), known, by_key)
    if cross_checks:
        check(settings, by_key)
    return settings


def checked(settings: Settings) -> Settings:
    """Validates settings from a record, which another version of fsbarrier may have written. Raises UsageError for a value that this
    version does not accept."""
    return _validated(settings.as_json(), known_names(), {})


def _validated(
    nested: Mapping[str, object], known: Mapping[str, Kind], chosen: Mapping[str, ChosenValue]
) -> Settings:
    try:
        model = _settings_model().model_validate(nested)
    except ValidationError as error:
        raise UsageError(one_line(error.errors(include_url=False), known, chosen)) from None
    # exclude_unset: settings that nobody chose get their default from sections.py.
    return Settings.from_json(model.model_dump(mode="json", exclude_unset=True))


@cache
def _settings_model() -> type[BaseModel]:
    return _model(Settings)


def _model(section: type[Section]) -> type[BaseModel]:
    """The pydantic model of a section. It rejects unknown names and does no implicit conversion."""
    values: dict[str, Any] = {name: (_for_pydantic(hint), None) for name, hint in _hints(section).items()}
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model(section.__name__, __config__=config, **values)


def _for_pydantic(hint: Any) -> Any:
    """Translates a setting's annotation for pydantic."""
    inner = get_args(hint)
    if NoneType in inner:
        return _for_pydantic(inner[0]) | None
    if get_origin(hint) is Annotated:
        return Annotated[(_for_pydantic(inner[0]), *map(_trait, inner[1:]))]
    if get_origin(hint) is Mapping and isinstance(inner[1], type) and issubclass(inner[1], Section):
        return dict[SetName, _model(inner[1])]  # type: ignore[misc]
    if get_origin(hint) is tuple:
        # TOML and JSON have only lists, so a list must be accepted for a tuple.
        return Annotated[GenericAlias(tuple, tuple(map(_for_pydantic, inner))), Field(strict=False)]
    return _model(hint) if isinstance(hint, type) and issubclass(hint, Section) else hint


def _trait(trait: Bounds | ShellWords) -> object:
    if isinstance(trait, ShellWords):
        return BeforeValidator(trait.convert)
    return Field(**{name: bound for name, bound in asdict(trait).items() if bound is not None})


def _check_name(item: ChosenValue, known: Mapping[str, Kind]) -> None:
    if known_as(item.key) in known or (item.key.startswith("custom.") and item.key != "custom."):
        return
    if item.key in sections():
        inside = ", ".join(name for name in known if name.startswith(f"{item.key}."))
        raise UsageError(f"{item.source}: {item.key} is a group of settings: {inside}")
    raise UsageError(f"{item.source}: unknown setting{nearest(item.key, known)}")


def _nest(values: Mapping[str, object]) -> dict[str, object]:
    nested: dict[str, object] = {}
    for key, value in values.items():
        *tables, name = key.split(".")
        inner = nested
        for table in tables:
            below = inner.setdefault(table, {})
            if not isinstance(below, dict):
                raise UsageError(f"{key}: {table} is a single value, not a group of settings")
            inner = below
        inner[name] = deepcopy(value)
    return nested
