"""`fsbarrier aggregate`: the same as `python -m fsbarrier.aggregate`, which holds it."""

from __future__ import annotations

from fsbarrier.aggregate import EXAMPLE, SUMMARY, add_arguments, main

__all__ = ["EXAMPLE", "SUMMARY", "add_arguments", "main"]
