"""Types that msgspec converts."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def ready(kind: type[T]) -> type[T]:
    """A decorator for dataclasses that several threads convert.

    msgspec examines a type when it first meets it. If two threads do so at once, one sees half of what is found, and the process dies of
    SIGSEGV. So it is examined here, while the module is imported.
    """
    msgspec.json.Decoder(kind)
    return kind
