"""What a terminal may be given of a text that came from a file: nothing that it obeys. Every command's output goes through here."""

from __future__ import annotations

import re

#: What a terminal takes for an order, begun with ESC or with one character of C1.
_ORDERS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\^_]"
)
_BREAKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"


def printable(text: str) -> str:
    """One line without control characters, escape sequences, and what changes the direction of text; breaks and tabs become blanks."""
    if text.isprintable():
        return text
    text = _ORDERS.sub("", text)
    return "".join([c if c.isprintable() else " " if c in _BREAKS else "" for c in text])
