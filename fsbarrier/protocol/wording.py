"""Words that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 node", "3 nodes": for nouns whose plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gib(amount: int) -> str:
    """Bytes as "1.5 GiB"."""
    return f"{amount / (1 << 30):.1f} GiB"
