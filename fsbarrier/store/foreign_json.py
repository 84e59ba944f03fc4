"""Parses JSON that somebody else has written: a judge, an agent, a peer on the network, the policy.

Python's own parser raises more errors than its documentation names. It raises RecursionError for deeply nested brackets. Half of a
surrogate pair or a number of thousands of digits causes a UnicodeEncodeError or OverflowError later, where the value is used. Here all
of these are one error, raised before anything is used.
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
    """A text is not acceptable JSON. The message says why."""


def parse(data: bytes | bytearray | str) -> Any:
    """Parse a JSON text in UTF-8. Raises NotJson and nothing else."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise NotJson(f"is nested more than {MAX_DEPTH} deep") from None
    # ValueError includes the errors of invalid UTF-8.
    except ValueError as error:
        raise NotJson(f"is not JSON: {_HALF if _has_half(data) else error}") from None
    _check(value)
    return value


def parse_object(data: bytes | bytearray | str) -> dict[str, Any]:
    """Like `parse`, but the value must be a JSON object. Raises NotJson."""
    value = parse(data)
    if not isinstance(value, dict):
        raise NotJson("is not a JSON object")
    return value


def _has_half(data: bytes | bytearray | str) -> bool:
    """Whether a text that cannot be parsed contains a surrogate, since the parser's own message does not say so."""
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    return _SURROGATE.search(text) is not None


def _check(value: object) -> None:
    """Raises NotJson if a value is nested too deeply, or has a number that is too long."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        following: list[object] = []
        for item in level:
            if isinstance(item, dict):
                following += item.values()
            elif isinstance(item, list):
                following += item
            elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
                raise NotJson(f"has a whole number of more than {MAX_INTEGER_BITS} bits")
        if not following:
            return
        level = following
    raise NotJson(f"is nested more than {MAX_DEPTH} deep")
