"""What a group of settings is: a frozen dataclass whose fields say what they mean, and its way into JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from enum import Enum
from typing import Any, Self, TypeVar

T = TypeVar("T")
S = TypeVar("S", bound="Section")


class Changes(Enum):
    """Whether a later start of node 0 may change a setting, and from when on the new value holds."""

    #: for the life of the run it is as in run.json
    NEVER = "never"
    #: from the next iteration that begins: results of one iteration must not be of two values
    NEXT_ITERATION = "with the next iteration"
    #: from the generation that takes node 0 in, in the middle of an iteration too
    AT_ONCE = "at once"
    #: each start chooses it anew, and the run's record keeps the first choice
    EACH_START = "each start"


NEXT_ITERATION, AT_ONCE, EACH_START = Changes.NEXT_ITERATION, Changes.AT_ONCE, Changes.EACH_START


def setting(default: T, description: str, changes: Changes = Changes.NEVER) -> T:
    """A setting's default and what it means; its type and limits are its annotation."""
    return field(default=default, metadata={"description": description, "changes": changes})


def table_of(section: type[S], description: str) -> Mapping[str, S]:
    """A setting that is a table: any number of groups of one kind, each by a name that people choose; none by default."""
    made: Any = field(
        default_factory=dict,
        metadata={"description": description, "changes": Changes.NEVER, "table_of": section},
    )
    return made  # type: ignore[no-any-return]


class Section:
    """A group of settings."""

    __slots__ = ()

    #: why those of its settings that never change do not
    FIXED_BECAUSE = "what the run has made so far depends on it"

    @classmethod
    def from_json(cls, nested: object) -> Self:
        """What `as_json` gave, read again. Values are taken as they are: they were checked when somebody chose them.

        Another version of fsbarrier may have written it: names that this one does not know are left out, and what it did not know
        has its default. Raises ValueError where there is a value in the place of a group.
        """
        if not isinstance(nested, Mapping):
            raise ValueError(f"{cls.__name__}: {nested!r} is no group of settings")
        values = {}
        for item in fields(cls):  # type: ignore[arg-type]
            if item.name in nested:
                value = nested[item.name]
                if isinstance(item.default, Section):
                    value = item.default.from_json(value)
                elif (of := item.metadata.get("table_of")) is not None:
                    value = {key: of.from_json(inner) for key, inner in value.items()}
                # JSON knows no tuples.
                values[item.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """The same with these values, by their dotted names, as `as_json` has them. Raises KeyError for a name that there is not."""
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
                    # A table of sections by names of the user's own.
                    own, _, leaf = rest.partition(".")
                    changed[first] = {**inner, own: inner[own].with_values({leaf: value})}
            else:
                changed[name] = tuple(value) if isinstance(value, list) else value
        return replace(self, **changed)  # type: ignore[type-var]

    def as_json(self) -> dict[str, object]:
        """As a run's record and the specs of programs hold them: nested tables of plain values."""
        # The slots of a dataclass are its fields. The simulator asks for this at every simulated program, and fields() is slow.
        names: tuple[str, ...] = self.__slots__
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, Section):
        return value.as_json()
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
