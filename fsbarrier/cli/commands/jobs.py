"""`fsbarrier jobs POOL_DIR` lists a pool's jobs; `jobs logs` shows the output of one; `jobs stop` stops one."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.protocol.wording import counted
from fsbarrier.rundir.heartbeats import read_beats

if TYPE_CHECKING:
    from fsbarrier.cli.pool.directory import PoolDirectory
    from fsbarrier.cli.pool.facts import Facts

SUMMARY = "List a pool's jobs, show a job's output, or stop a job: jobs POOL_DIR | jobs logs POOL_DIR N | jobs stop POOL_DIR N"
EXAMPLE = """fsbarrier jobs /shared/pool
  fsbarrier jobs logs /shared/pool 7 --node 2 --follow
  fsbarrier jobs stop /shared/pool 7"""
ACTIONS = ("logs", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="[logs|stop] POOL_DIR [N]", help="N: number of the job")
    parser.add_argument("--node", metavar="R", type=flags.whole_number, help="logs: only this node")
    parser.add_argument(
        "-n",
        "--lines",
        metavar="N",
        type=flags.whole_number,
        default=20,
        help="logs: number of lines per node (default 20)",
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="logs: keep printing new lines until the job ends"
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def main(args: argparse.Namespace) -> int:
    from fsbarrier.cli.pool import directory

    action = args.words[0] if args.words[0] in ACTIONS else ""
    rest = args.words[1:] if action else args.words
    if len(rest) != (2 if action else 1):
        raise UsageError(
            f"jobs {action or ''}: ".replace(" :", ":") + f"give POOL_DIR{' N' if action else ''}"
        )
    pool = directory.existing(preflight.absolute(rest[0]))
    facts = pool.read()
    if not action:
        return _list(pool, facts, as_json=args.json)
    number = int(rest[1]) if rest[1].isdecimal() else -1
    if number not in facts.jobs:
        raise UsageError(
            f"{rest[1]}: the pool has no such job; `fsbarrier jobs {rest[0]}` lists its {counted(len(facts.jobs), 'job')}"
        )
    return _logs(pool, facts, number, args) if action == "logs" else _stop(pool, facts, number)


def _waiting(pool: PoolDirectory, facts: Facts, jobs: Iterable[int]) -> dict[int, str]:
    """What each queued job among `jobs` is waiting for."""
    from fsbarrier.cli.pool.facts import waits_for

    queued = [number for number in jobs if facts.state(number) == "queued"]
    # Checking which nodes are alive takes a moment, so do it only if needed.
    living = pool.living() if queued else []
    return {number: what for number in queued if (what := waits_for(facts, number, living))}


def _list(pool: PoolDirectory, facts: Facts, *, as_json: bool) -> int:
    rows, waiting = [], _waiting(pool, facts, sorted(facts.jobs))
    for number, job in sorted(facts.jobs.items()):
        nodes = [one.node for _, one in sorted(facts.placements(number).items())]
        end = facts.over(number)
        rows.append(
            {
                "job": number,
                "state": facts.state(number),
                "exit_code": end.exit_code if end else None,
                "waits_for": waiting.get(number),
                "on": nodes,
                "iteration": _iteration(job.log_path) if nodes else 0,
                **asdict(job),
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    from fsbarrier.view.listing import print_listing

    names = ("job", "name", "state", "priority", "nodes", "iteration", "run directory", "submitted")
    cells = [
        (
            row["job"],
            row["name"],
            f"{row['state']} ({row['exit_code']})" if row["state"] == "failed" else row["state"],
            row["priority"],
            f"{row['nodes']} ({', '.join(map(str, row['on']))})" if row["on"] else row["nodes"],
            row["iteration"] or "–",
            row["log_path"].removeprefix(f"{pool.root}/"),
            f"{row['time']} {row['submitted_by']}",
        )
        for row in rows
    ]
    print_listing(names, cells, right=("job", "priority", "iteration"), shortened="name", styles={})
    for number, what in waiting.items():
        print(f"job {number} is waiting for {what}")
    return 0


def _iteration(log_path: str) -> int:
    """The newest iteration that a node of the run has come to; 0 if none has begun, or nothing there can be read."""
    try:
        return max((beat.iteration for beat in read_beats(Path(log_path)).values()), default=0)
    except (FsbarrierError, OSError):
        return 0


def _logs(pool: PoolDirectory, facts: Facts, number: int, args: argparse.Namespace) -> int:
    from fsbarrier.rundir.log_tail import last_lines

    if args.follow:
        return _follow(pool, number, args)
    found = [rank for rank in pool.logged(number) if args.node in (None, rank)]
    if not found:
        what = _waiting(pool, facts, [number]).get(number)
        raise UsageError(f"job {number} has no output yet{f'; it is waiting for {what}' if what else ''}")
    for rank in found:
        for line in last_lines(pool.log(number, rank), args.lines):
            print(f"[node {rank}] {line}")
    return 0


def _follow(pool: PoolDirectory, number: int, args: argparse.Namespace) -> int:
    from fsbarrier.cli.commands.logs import LOOK_S, last_lines, new_lines

    pause, offsets, over = threading.Event(), dict[int, int](), False
    while not over:
        # Check the state before reading the logs, so that no output of a finished job is missed.
        over = pool.read().over(number) is not None
        for rank in pool.logged(number):
            if args.node in (None, rank):
                path = pool.log(number, rank)
                begun = rank in offsets
                lines, offsets[rank] = (
                    new_lines(path, offsets[rank]) if begun else last_lines(path, args.lines)
                )
                for line in lines:
                    print(f"[node {rank}] {line}", flush=True)
        pause.wait(0 if over else LOOK_S)
    return 0


def _stop(pool: PoolDirectory, facts: Facts, number: int) -> int:
    from fsbarrier.store.identity import user_at_host

    if facts.over(number):
        print(f"job {number} has already ended: {facts.state(number)}")
        return 0
    pool.stop(number, user_at_host())
    print(f"asked job {number} to stop")
    return 0
