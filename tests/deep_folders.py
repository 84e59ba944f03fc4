"""Folders nested deeper than Python's calls may be."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def nest(top: Path) -> None:
    """Make `top`, and in it a folder in a folder, and so on."""
    top.mkdir(parents=True)
    with contextlib.chdir(top):
        for _ in range(sys.getrecursionlimit() + 200):
            os.mkdir("d")
            os.chdir("d")
