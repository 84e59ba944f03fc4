"""Sanitizes text from files before it is printed to a terminal: removes escape sequences and passwords. All commands use it."""

from __future__ import annotations

import re

#: terminal escape sequences, introduced by ESC or a C1 control character
_ORDERS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\^_]"
)
_BREAKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"


#: A user's name and password stand in a URL between `//` and `@`. Their length is limited so that a hostile text cannot slow the search.
_PASSWORD = re.compile(r"(?<=://)([^\s/:@\"']{0,200}):[^\s/@\"']{1,500}@")


def without_passwords(text: str) -> str:
    """The text with *** in place of passwords in URLs, as in https://user:password@host."""
    return _PASSWORD.sub(r"\1:***@", text) if "://" in text and "@" in text else text


def printable(text: str) -> str:
    """The text as one line without control characters, escape sequences, bidirectional controls, and passwords in URLs.

    Line breaks and tabs become blanks.
    """
    text = without_passwords(text)
    if text.isprintable():
        return text
    text = _ORDERS.sub("", text)
    return "".join([c if c.isprintable() else " " if c in _BREAKS else "" for c in text])
