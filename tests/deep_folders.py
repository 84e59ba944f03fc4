"""Folders nested deeper than Python's calls may be."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def nested(top: Path) -> Iterator[None]:
    """`top`, and in it a folder in a folder, and so on; removed in the end, which pytest could not do."""
    top.mkdir(parents=True)
    with contextlib.chdir(top):
        for _ in range(sys.getrecursionlimit() + 200):
            os.mkdir("d")
            os.chdir("d")
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", top], check=True)
