"""`fsbarrier status`: shows the progress of a run and the state of each node, from any machine that mounts its directory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsbarrier.cli.commands import flags
from fsbarrier.view.run_status import RunStatus, read_status

if TYPE_CHECKING:
    from rich.console import RenderableType

SUMMARY = "Show the progress of a run and the state of each node. Waits until every heartbeat has advanced, at most 1.5 beats."
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
    from rich.console import Console

    from fsbarrier.view.summary import print_parts

    console = Console(highlight=False)
    print_parts(page(status, min(console.width, 120)), console)
    return 0


def page(status: RunStatus, width: int) -> Iterator[RenderableType]:
    """The human-readable output."""
    from fsbarrier.view import terminal_lines as lines
    from fsbarrier.view.node_table import nodes_table

    yield from lines.header(status, width)
    yield ""
    yield nodes_table(status, width)
    yield from lines.waiting_line(status)
    yield from lines.problem_lines(status, width, 20)
    yield ""
    yield from lines.reward_lines(status.rewards, width)
    yield from lines.time_line(status.finished_times[-1:], width)
    yield from lines.figures_line(status.figures, width)
    yield from lines.file_lines(status)
