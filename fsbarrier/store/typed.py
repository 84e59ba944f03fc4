"""Types that msgspec converts."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def ready(kind: type[T]) -> type[T]:
    """A decorator for dataclasses that several threads convert.

    msgspec examines a type at its first use. If two threads do that at once, one of them sees a half-built result, and the process dies of
    SIGSEGV. So the type is examined here, while its module is imported.
    """
    msgspec.json.Decoder(kind)
    return kind
