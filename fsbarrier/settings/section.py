"""The base class for groups of settings: frozen dataclasses with described fields, and their conversion to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from enum import Enum
from typing import Any, Self, TypeVar

T = TypeVar("T")
S = TypeVar("S", bound="Section")


class Changes(Enum):
    """Whether a setting may have another value later."""

    #: fixed for the life of the run, as recorded in run.json
    NEVER = "never"
    #: when a session begins, by what its start of node 0 names
    EACH_SESSION = "each session"
    #: each start chooses its own value; the run's record keeps the first one
    EACH_START = "each start"


EACH_SESSION, EACH_START = Changes.EACH_SESSION, Changes.EACH_START


def setting(default: T, description: str, changes: Changes = Changes.NEVER) -> T:
    """A setting with its default and description. Its annotation gives the type and the limits."""
    return field(default=default, metadata={"description": description, "changes": changes})


def table_of(section: type[S], description: str) -> Mapping[str, S]:
    """A setting that is a table of groups of one kind, keyed by names that the user chooses; empty by default."""
    made: Any = field(
        default_factory=dict,
        metadata={"description": description, "changes": Changes.NEVER, "table_of": section},
    )
    return made  # type: ignore[no-any-return]


class Section:
    """A group of settings."""

    __slots__ = ()

    #: completes the error "it cannot change, because ..."
    FIXED_BECAUSE = "what the run has made so far depends on it"

    @classmethod
    def from_json(cls, nested: object) -> Self:
        """Rebuilds the section from `as_json` output. Values are not checked again: they were checked when the user chose them.

        The JSON may come from another version of fsbarrier: unknown names are ignored, and missing names get their default. Raises
        ValueError if a group is not a table.
        """
        if not isinstance(nested, Mapping):
            raise ValueError(f"{cls.__name__}: expected a group of settings, got {nested!r}")
        values = {}
        for item in fields(cls):  # type: ignore[arg-type]
            if item.name in nested:
                value = nested[item.name]
                if isinstance(item.default, Section):
                    value = item.default.from_json(value)
                elif (of := item.metadata.get("table_of")) is not None:
                    value = {key: of.from_json(inner) for key, inner in value.items()}
                # JSON has no tuples.
                values[item.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """A copy with these values, given by dotted name in the form of `as_json`. Raises KeyError for an unknown name."""
        changed: dict[str, object] = {}
        for name, value in values.items():
            first, dot, rest = name.partition(".")
            if first not in self.__slots__:
                raise KeyError(name)
            if dot:
                inner = changed.get(first, getattr(self, first))
                if isinstance(inner, Section):
                    changed[first] = inner.with_values({rest: value})
                elif isinstance(inner, Mapping):
                    # A table of sections, keyed by names that the user chose.
                    own, _, leaf = rest.partition(".")
                    changed[first] = {**inner, own: inner[own].with_values({leaf: value})}
            else:
                changed[name] = tuple(value) if isinstance(value, list) else value
        return replace(self, **changed)  # type: ignore[type-var]

    def as_json(self) -> dict[str, object]:
        """Nested dictionaries of plain values, as stored in the run's record and in program specs."""
        # The slots of a dataclass are its fields. fields() is too slow for the simulator, which calls this for every program.
        names: tuple[str, ...] = self.__slots__
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, Section):
        return value.as_json()
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
