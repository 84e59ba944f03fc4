"""Parses JSON that somebody else has written: a judge, an agent, a peer on the network, the policy.

Python's own parser raises other errors than its documentation names: RecursionError for brackets that are nested deeply, and later
UnicodeEncodeError or OverflowError where a half of a surrogate pair or a number of thousands of digits is used. Here all of that is one
error, raised before anything is used.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

#: how deep lists and objects may be nested
MAX_DEPTH = 100
#: the longest whole number, so that it fits into a float
MAX_INTEGER_BITS = 64

_HALF = "half of a surrogate pair, which is no text"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


class NotJson(ValueError):
    """The message says why."""


def parse(data: bytes | bytearray | str, most: int | None = None) -> Any:
    """The value of a JSON text in UTF-8, of at most `most` bytes. Raises NotJson, and nothing else."""
    if most is not None and len(data) > most:
        raise NotJson(f"has {len(data)} bytes, and {most} are allowed")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise NotJson(f"is nested more than {MAX_DEPTH} deep") from None
    # This includes what is no UTF-8.
    except ValueError as error:
        raise NotJson(f"is not JSON: {_HALF if _has_half(data) else error}") from None
    _check(value)
    return value


def parse_object(data: bytes | bytearray | str, most: int | None = None) -> dict[str, Any]:
    """The same for a JSON object. Raises NotJson."""
    value = parse(data, most)
    if not isinstance(value, dict):
        raise NotJson("is not a JSON object")
    return value


def _has_half(data: bytes | bytearray | str) -> bool:
    """Whether a text that cannot be parsed names a surrogate, of which the parser says only that something is missing."""
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    return _SURROGATE.search(text) is not None


def _check(value: object) -> None:
    """Raises NotJson if a value is nested too deeply, or has a number that is too long."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        following: list[object] = []
        for one in level:
            if isinstance(one, dict):
                following += one.values()
            elif isinstance(one, list):
                following += one
            elif isinstance(one, int) and one.bit_length() > MAX_INTEGER_BITS:
                raise NotJson(f"has a whole number of more than {MAX_INTEGER_BITS} bits")
        if not following:
            return
        level = following
    raise NotJson(f"is nested more than {MAX_DEPTH} deep")
