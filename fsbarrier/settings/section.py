"""The base class for groups of settings: frozen dataclasses with described fields, and their conversion to and from JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Self, TypeVar

import msgspec

from fsbarrier.errors import UsageError

T = TypeVar("T")


class Changes(Enum):
    """Whether a setting may have another value later."""

    #: fixed for the life of the run, as recorded in run.json
    NEVER = "never"
    #: may change when a session begins, if the start of node 0 names it
    EACH_SESSION = "each session"
    #: each start chooses its own value; the run's record keeps the first one
    EACH_START = "each start"


EACH_SESSION, EACH_START = Changes.EACH_SESSION, Changes.EACH_START
#: the types of settings that may change; all others are fixed
EachSession = Annotated[T, EACH_SESSION]
EachStart = Annotated[T, EACH_START]


class Section:
    """A group of settings."""

    __slots__ = ()

    @classmethod
    def from_json(cls, nested: object) -> Self:
        """Rebuilds the section from nested tables. Raises ValueError for a value that its setting does not accept.

        The JSON may come from another version of fsbarrier: unknown names are ignored, and missing names get their default.
        """
        return msgspec.convert(nested, cls)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """A copy with these values, given by dotted name. Raises UsageError for a value that its setting does not accept."""
        try:
            return self.from_json(nest(values, self.as_json()))
        except ValueError as error:
            raise UsageError(str(error)) from None

    def as_json(self) -> dict[str, Any]:
        """Nested dictionaries of plain values, as stored in the run's record and in program specs."""
        plain: dict[str, Any] = msgspec.json.decode(self.encoded())
        return plain

    def encoded(self) -> bytes:
        """`as_json` as text. Raises UsageError for a text that is not UTF-8, as a path from the command line may be."""
        try:
            return msgspec.json.encode(self)
        except UnicodeEncodeError as error:
            shown = os.fsencode(error.object).decode(errors="backslashreplace")
            raise UsageError(
                f"'{shown}' is not UTF-8, so the other nodes cannot be told of it; rename it"
            ) from None

    def flat(self) -> dict[str, Any]:
        """The values of `as_json` by their dotted names."""
        return dict(leaves(self.as_json()))


def leaves(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested tables by their dotted names. An empty table is a value too. Raises ValueError for tables in 20 tables."""
    if prefix.count(".") > 20:
        raise ValueError(f"{prefix[:40]}...: tables are nested too deeply")
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def nest(values: Mapping[str, object], into: dict[str, Any]) -> dict[str, Any]:
    """Put these values, given by dotted name, into `into`, and return it. Raises ValueError if a part of a name is a single value."""
    for key, value in values.items():
        *tables, name = key.split(".")
        inner = into
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{key}: {table} is a single value, not a group of settings")
        if value == {}:
            # An empty table removes no values.
            inner.setdefault(name, {})
        else:
            inner[name] = value
    return into
