"""Runs a script of this folder as a command: parses its arguments, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from fsbarrier.errors import FsbarrierError


def run(
    doc: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    main: Callable[[argparse.Namespace], int],
) -> int:
    """Run the command whose module has this docstring; returns its exit code."""
    parser = argparse.ArgumentParser(description=doc)
    add_arguments(parser)
    try:
        return main(parser.parse_args())
    except FsbarrierError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code
