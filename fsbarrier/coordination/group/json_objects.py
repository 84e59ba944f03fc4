"""The objects that members of a group exchange: JSON data up to a size."""

from __future__ import annotations

import json
from typing import Any

#: The longest JSON text. Escaped inside a record it stays below the longest record that nodes read.
MAX_OBJECT_BYTES = 24 * 1024 * 1024


def to_json(obj: object) -> str:
    """`obj` as JSON. Raises TypeError or ValueError, so an object that cannot be sent fails on the sender."""
    hint = "a group exchanges JSON data: None, bool, int, float, str, lists, and dicts with str keys"
    try:
        text = json.dumps(obj, separators=(",", ":"))
        survives = _survives(obj, json.loads(text))
    except TypeError as error:
        raise TypeError(f"{error}; {hint}. Write anything else to a file and send its path") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this object cannot be sent: {error}; {hint}") from None
    if not survives:
        raise TypeError(f"JSON would change this object (dict keys that are no str?); {hint}")
    if len(text) > MAX_OBJECT_BYTES:
        raise ValueError(
            f"this object is {len(text)} bytes of JSON, at most {MAX_OBJECT_BYTES} can be sent; write it to a file and send its path"
        )
    return text


def _survives(obj: object, back: Any) -> bool:
    """Whether an object survived the round trip; a tuple may become a list."""
    if isinstance(obj, dict):
        return obj.keys() == back.keys() and all(_survives(value, back[key]) for key, value in obj.items())
    if isinstance(obj, list | tuple):
        return all(map(_survives, obj, back))
    return True
