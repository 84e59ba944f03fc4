"""Show the last lines of the nodes' logs (from each node's latest start), or follow them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from fsbarrier.cli.commands import flags
from fsbarrier.cli.follow_logs import Log, show
from fsbarrier.errors import UsageError
from fsbarrier.rundir.journal import Event, read_events
from fsbarrier.rundir.log_tail import log_folders
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.view.event_wording import event_line, log_lines

#: Show events of all nodes within this many seconds of the failure, and at most this many before and after it.
AROUND_S, AROUND = 10.0, 8
EXAMPLE = """fsbarrier logs --node 2 --file vllm -n 100
  fsbarrier logs --first-error"""
FLAGS = {
    "--node R": "only this node",
    "--file NAME": "only this log: daemon, vllm, rollout, update, ...",
    "--attempt A": "logs of this start of the node (default: the latest)",
    "-n --lines N": "number of lines per log (default 20)",
    "--first-error": "show only the earliest failure on any node, with its context",
    "-f --follow": "keep printing new lines until Ctrl-C",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, FLAGS, lines=20)


def main(args: argparse.Namespace) -> int:
    paths = flags.find_run(args).paths
    if args.first_error:
        lines = first_error(read_events(paths.root))
        print("\n".join(lines or ["no node, program or phase of this run has failed"]))
        return 0

    def logs() -> list[Log]:
        return find(paths, node=args.node, attempt=args.attempt, name=args.file)

    if not logs() and not args.follow:
        filters = {"--node": args.node, "--file": args.file, "--attempt": args.attempt}
        typed = [f"{flag} {value}" for flag, value in filters.items() if value is not None]
        flag = " ".join(typed) or f"--log-path {paths.root}"
        raise UsageError(f"{flag}: no matching logs in {paths.logs}")
    show(logs, args.lines, follows=lambda: bool(args.follow))
    return 0


def find(
    paths: RunPaths, *, node: int | None = None, attempt: int | None = None, name: str | None = None
) -> list[Log]:
    """The matching logs of each node's latest start, or of this attempt, sorted by node and name."""
    return [
        Log(f"[node {rank} {path.stem}]", path)
        for rank, folder in log_folders(paths, attempt).items()
        for path in sorted(folder.glob("*.log"))
        if node in (None, rank) and name in (None, path.stem, path.name)
    ]


# --- the first error --------------------------------------------------------------------------------------------------------


def first_error(events: Sequence[Event]) -> list[str]:
    """The lines to show; [] if nothing has failed. `events`: sorted by time."""
    failed = next((event for event in events if _is_failure(event)), None)
    if failed is None:
        return []
    shown = [event for event in events if abs(event.at - failed.at) <= AROUND_S and event_line(event)]
    # Several nodes report the same loss. Keep only the first report.
    before = [event for event in shown if event.at <= failed.at and event is not failed][-AROUND:]
    after = [event for event in shown if event.at > failed.at][:AROUND]
    lines = ["the first failure:", *_indented(log_lines(failed))]
    lines += ["", "events around it, on all nodes:"]
    lines += _indented(f"node {event.node_rank}: {event_line(event)}" for event in (*before, failed, *after))
    return lines


def _is_failure(event: Event) -> bool:
    ended = event.name == "node_ended" and event.text("state") == "broken"
    return ended or event.name in ("work_failed", "node_lost")


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
