"""Merges and validates user input into one frozen `Settings`.

Precedence, lowest first: the defaults in sections.py, the caller's defaults (settings of the built-in task, timeouts for many nodes),
`algorithm.preset`, `--config FILE.toml`, flags, `key=value`. User input arrives as ChosenValue (sources.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fsbarrier.errors import UsageError
from fsbarrier.settings.checks import check, shown
from fsbarrier.settings.presets import preset_values
from fsbarrier.settings.section import nest
from fsbarrier.settings.sections import Settings, known_names, sections
from fsbarrier.settings.sources import ChosenValue, known_as, name_in, nearest
from fsbarrier.settings.value_types import Kind

#: the kind of the settings `custom.*`
ANYTHING = Kind(Any, "free")


def resolve(
    chosen: Iterable[ChosenValue], defaults: Mapping[str, object] | None = None, *, cross_checks: bool = True
) -> Settings:
    """Merges `chosen` over `defaults` (by dotted name) and validates the result. Raises UsageError.

    `cross_checks=False` skips the checks between settings, for callers that do not know all of them yet.
    """
    by_key = {item.key: item for item in chosen}
    below = {key: _converted(ChosenValue(key, value, key)) for key, value in (defaults or {}).items()}
    own = {key: _converted(item) for key, item in by_key.items()}
    values = {**below, **preset_values(own.get("algorithm.preset")), **own}
    if "rank_weights" not in values:
        values["rank_weights"] = [1.0] * int(str(values.get("num_nodes", 1)))
    try:
        settings = Settings.from_json(nest(values, {}))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if cross_checks:
        check(settings, by_key)
    return settings


def _converted(item: ChosenValue) -> object:
    """The value as its setting holds it. Raises UsageError for an unknown name or a value that the setting does not accept."""
    known = known_names()
    kind = known.get(known_as(item.key))
    if kind is None and item.key.startswith("custom.") and item.key != "custom.":
        kind = ANYTHING
    if kind is None and item.key in sections():
        inside = ", ".join(name for name in known if name.startswith(f"{item.key}."))
        raise UsageError(f"{item.source}: {item.key} is a group of settings: {inside}")
    if kind is None:
        raise UsageError(f"{item.source}: unknown setting{nearest(item.key, known)}")
    # The name of an evaluation set becomes part of dotted names and of metric names, that of an engine of file names.
    if not re.fullmatch("[A-Za-z0-9_-]*", name_in(item.key)):
        raise UsageError(f"{item.source}: the name of a set or an engine may have letters, digits, _ and -")
    try:
        return kind.converted(item.value)
    except ValueError as error:
        raise UsageError(f"{item.source}: {error}, got {shown(item.value)}") from None
