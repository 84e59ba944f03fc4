"""`fsbarrier report`: a run's figures as one self-contained HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsbarrier import files
from fsbarrier.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.start import preflight

SUMMARY = "Write a run's rewards, times, node timelines and events as one HTML file that needs nothing else. The run may go on."
EXAMPLE = "fsbarrier report --log-path runs/default --out report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="where to write (default: report.html in the run directory)"
    )
    parser.add_argument(
        "--iterations",
        metavar="N",
        type=flags.whole_number,
        default=3,
        help="newest iterations whose timeline is drawn (default 3)",
    )


def main(args: argparse.Namespace) -> int:
    from fsbarrier.view.report import page
    from fsbarrier.view.run_status import look_once

    log_path = flags.find_log_path(args)
    html = page(*look_once(log_path), iterations=args.iterations)
    out = preflight.absolute(args.out) if args.out else log_path / "report.html"
    write(out, html.encode())
    print(out)
    return 0


def write(out: Path, data: bytes) -> None:
    """Put the report there in one step. Raises UsageError where that cannot be done."""
    if out.is_dir():
        raise UsageError(f"--out {out}: is a directory; name a file")
    try:
        files.write_atomic(out, data)
    except OSError as error:
        raise UsageError(
            f"--out {out}: cannot be written: {error.strerror or error}; name another file with --out"
        ) from None
