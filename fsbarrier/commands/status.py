"""`fsbarrier status`: where a run is and how each node is doing, from any machine that sees its directory."""

from __future__ import annotations

import argparse
import json

from fsbarrier.commands import flags
from fsbarrier.view.status import read_status

SUMMARY = "Show where a run is and how each node is doing. Looks until every heartbeat has moved, or for one and a half beats."
EXAMPLE = "fsbarrier status --log-path runs/default --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.add_argument(
        "--no-watch", action="store_true", help="answer at once; whether a silent node lives is then unknown"
    )


def main(args: argparse.Namespace) -> int:
    status = read_status(flags.find_log_path(args), watch=not args.no_watch)
    if args.json:
        print(json.dumps(status.to_json(), indent=2))
        return 0
    from rich.console import Console

    from fsbarrier.view.console import print_parts, status_parts

    console = Console(highlight=False)
    print_parts(status_parts(status, min(console.width, 120)), console)
    return 0
