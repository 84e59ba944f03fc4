"""What a terminal may be given of a text that came from a file: nothing that it obeys. Every command's output goes through here."""

from __future__ import annotations

import re

#: What a terminal takes for an order, begun with ESC or with one character of C1.
_ORDERS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\^_]"
)
_BREAKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"


#: In an address, between `//` and `@`; no longer than a password is, so that a hostile text costs no time.
_PASSWORD = re.compile(r"(?<=://)([^\s/:@\"']{0,200}):[^\s/@\"']{1,500}@")


def without_passwords(text: str) -> str:
    """The text with *** for the password of each address in it, as in https://user:password@host."""
    return _PASSWORD.sub(r"\1:***@", text) if "://" in text and "@" in text else text


def printable(text: str) -> str:
    """One line without control characters, escape sequences, what changes the direction of text, and passwords in addresses.

    Breaks and tabs become blanks.
    """
    text = without_passwords(text)
    if text.isprintable():
        return text
    text = _ORDERS.sub("", text)
    return "".join([c if c.isprintable() else " " if c in _BREAKS else "" for c in text])
