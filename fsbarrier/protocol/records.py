"""Records that are never changed: dataclasses that the type checker freezes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A dataclass whose fields are never assigned to again: equal and hashed by value.

    The type checker sees to it. `frozen=True` would do so at run time, and make each record cost twice as much: a node that waits
    makes thousands of them a second.
    """
    return dataclass(unsafe_hash=True)(cls)


@dataclass_transform(frozen_default=True, order_default=True, field_specifiers=(field,))
def ordered_record(cls: type[T]) -> type[T]:
    """A record that comes before another one, or after it, by its fields in their order."""
    return dataclass(unsafe_hash=True, order=True)(cls)
