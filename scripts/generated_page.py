"""A page that a script writes, and that a check finds out of date: the command line of scripts/settings_doc.py and state_diagram.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def write_or_check(page: Path, wanted: str, description: str | None, script: str) -> int:
    """Write `wanted` to `page`; with `--check` only say whether that is needed. Gives the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where the page is out of date"
    )
    check = parser.parse_args().check
    if page.is_file() and page.read_text(encoding="utf-8") == wanted:
        return 0
    if check:
        shown = page.relative_to(Path(__file__).resolve().parent.parent)
        print(f"{shown} is out of date: run `python scripts/{script}`", file=sys.stderr)
        return 1
    page.write_text(wanted, encoding="utf-8")
    return 0
