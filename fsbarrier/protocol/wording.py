"""Words that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str, nouns: str = "") -> str:
    """ "1 node", "3 nodes". `nouns`: the plural, where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def gib(amount: int) -> str:
    """Bytes as "1.5 GiB"."""
    return f"{amount / (1 << 30):.1f} GiB"
