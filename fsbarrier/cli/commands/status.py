"""Show the progress of a run and the state of each node. Waits until every heartbeat has advanced, at most 1.5 beats."""

from __future__ import annotations

import argparse
import json

from fsbarrier.cli.commands import flags
from fsbarrier.view.run_status import read_status

EXAMPLE = "fsbarrier status --log-path runs/default --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    watch = "do not wait for heartbeats; the state of silent nodes is then unknown"
    flags.add(parser, {"--json": "print one JSON object", "--no-watch": watch})


def main(args: argparse.Namespace) -> int:
    status = read_status(flags.find_log_path(args), watch=not args.no_watch)
    if args.json:
        print(json.dumps(status.to_json(), indent=2))
        return 0
    from fsbarrier.view.summary import print_status

    print_status(status)
    return 0
