"""What a group of settings is: a frozen dataclass whose fields say what they mean, and its way into JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Self, TypeVar

T = TypeVar("T")


def setting(default: T, description: str) -> T:
    """A setting's default and what it means; its type and limits are its annotation."""
    return field(default=default, metadata={"description": description})


class Section:
    """A group of settings."""

    __slots__ = ()

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
                # JSON knows no tuples.
                values[item.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def as_json(self) -> dict[str, object]:
        """As a run's record and the specs of programs hold them: nested tables of plain values."""
        # The slots of a dataclass are its fields. The simulator asks for this at every simulated program, and fields() is slow.
        names: tuple[str, ...] = self.__slots__
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, Section):
        return value.as_json()
    return list(value) if isinstance(value, tuple) else value
