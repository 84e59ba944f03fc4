"""Show the last lines of the nodes' logs (from each node's latest start), or follow them."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.rundir.logs import Log, show
from fsbarrier.rundir.names import ATTEMPT_FOLDER, NODE_FOLDER
from fsbarrier.rundir.paths import RunPaths

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
        return _first_error(paths)

    def logs() -> list[Log]:
        return find(paths, node=args.node, attempt=args.attempt, name=args.file)

    if not logs() and not args.follow:
        filters = {"--node": args.node, "--file": args.file, "--attempt": args.attempt}
        typed = [f"{flag} {value}" for flag, value in filters.items() if value is not None]
        flag = " ".join(typed) or f"--log-path {paths.root}"
        raise UsageError(f"{flag}: no matching logs in {paths.logs}")
    show(logs, args.lines, follows=lambda: bool(args.follow))
    return 0


def _first_error(paths: RunPaths) -> int:
    from fsbarrier.rundir.journal import read_events
    from fsbarrier.view.first_error import first_error

    lines = first_error(read_events(paths.root), paths.logs)
    print("\n".join(lines or ["no node, program or phase of this run has failed"]))
    return 0


def find(
    paths: RunPaths, *, node: int | None = None, attempt: int | None = None, name: str | None = None
) -> list[Log]:
    """The matching logs of each node's latest matching start, sorted by node and name."""
    matching: dict[int, dict[int, list[Path]]] = {}
    for path in sorted(paths.logs.glob("*/*/*.log")):
        # A link could lead out of the run directory to other files.
        if path.parent.is_symlink() or path.parent.parent.is_symlink():
            continue
        start, rank = ATTEMPT_FOLDER.parse(path.parent.parent.name), NODE_FOLDER.parse(path.parent.name)
        if start is None or rank is None or node not in (None, rank) or attempt not in (None, start):
            continue
        if name in (None, path.stem, path.name):
            matching.setdefault(rank, {}).setdefault(start, []).append(path)
    newest = {rank: starts[max(starts)] for rank, starts in sorted(matching.items())}
    return [Log(f"[node {rank} {path.stem}]", path) for rank, paths in newest.items() for path in paths]
