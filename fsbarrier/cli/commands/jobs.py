"""List a pool's jobs, show a job's output, or stop a job: jobs POOL_DIR | jobs logs POOL_DIR N | jobs stop POOL_DIR N"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.rundir.heartbeats import read_beats
from fsbarrier.rundir.logs import Log, show
from fsbarrier.wording import counted

if TYPE_CHECKING:
    from fsbarrier.pool.directory import Pool

EXAMPLE = """fsbarrier jobs /shared/pool
  fsbarrier jobs logs /shared/pool 7 --node 2 --follow
  fsbarrier jobs stop /shared/pool 7"""
ACTIONS = ("logs", "stop")
FLAGS = {
    "--node R": "logs: only this node",
    "-n --lines N": "logs: number of lines per node (default 20)",
    "-f --follow": "logs: keep printing new lines until the job ends",
    "--json": "print the list as JSON",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="[logs|stop] POOL_DIR [N]", help="N: number of the job")
    flags.add(parser, FLAGS, lines=20)


def main(args: argparse.Namespace) -> int:
    from fsbarrier.pool import directory

    action = args.words[0] if args.words[0] in ACTIONS else ""
    rest = args.words[1:] if action else args.words
    if len(rest) != (2 if action else 1):
        raise UsageError(f"jobs{f' {action}' if action else ''}: give POOL_DIR{' N' if action else ''}")
    pool = directory.existing(preflight.absolute(rest[0]))
    jobs = pool.read().jobs
    if not action:
        return _list(pool, as_json=args.json)
    number = int(rest[1]) if rest[1].isdecimal() else -1
    if number not in jobs:
        raise UsageError(
            f"{rest[1]}: the pool has no such job; `fsbarrier jobs {rest[0]}` lists its {counted(len(jobs), 'job')}"
        )
    return _logs(pool, number, args) if action == "logs" else _stop(pool, number)


def _list(pool: Pool, *, as_json: bool) -> int:
    jobs, rows = pool.queue.jobs, []
    for number, state in jobs.items():
        hosts = [pool.queue.hosts.get(place.node, "?") for _, place in sorted(state.places.items())]
        rows.append(
            {
                "job": number,
                "state": state.word,
                "exit_code": state.over.exit_code if state.over else None,
                "on": hosts,
                "iteration": _iteration(pool.run_of(number)) if hosts else 0,
                **msgspec.to_builtins(state.job),
                "log_path": str(pool.run_of(number)),
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    from fsbarrier.view.terminal_lines import print_listing

    names = ("job", "name", "state", "priority", "nodes", "iteration", "run directory", "submitted")
    cells = [
        (
            row["job"],
            row["name"],
            f"{row['state']} ({row['exit_code']})" if row["state"] == "failed" else row["state"],
            row["priority"],
            f"{row['nodes']} ({', '.join(row['on'])})" if row["on"] else row["nodes"],
            row["iteration"] or "–",
            row["log_path"].removeprefix(f"{pool.root}/"),
            f"{row['time']} {row['submitted_by']}",
        )
        for row in rows
    ]
    print_listing(names, cells, right=("job", "priority", "iteration"), shortened="name", styles={})
    if any(row["state"] == "queued" for row in rows):
        # Checking which nodes are alive takes a moment, so do it only if needed.
        living = pool.living()
        print(
            f"the pool has {counted(len(living), 'node')}, of which {len(pool.queue.free(living))} can take a job"
        )
    return 0


def _iteration(log_path: Path) -> int:
    """The newest iteration that a node of the run has come to; 0 if none has begun, or nothing there can be read."""
    try:
        return max((beat.iteration for beat in read_beats(log_path).values()), default=0)
    except (FsbarrierError, OSError):
        return 0


def _logs(pool: Pool, number: int, args: argparse.Namespace) -> int:
    def find() -> list[Log]:
        ranks = [rank for rank in pool.logged(number) if args.node in (None, rank)]
        return [Log(f"[node {rank}]", pool.log(number, rank)) for rank in ranks]

    if not args.follow and not find():
        raise UsageError(f"job {number} has no output yet: it is {pool.queue.jobs[number].word}")
    show(find, args.lines, follows=lambda: args.follow and pool.read().jobs[number].over is None)
    return 0


def _stop(pool: Pool, number: int) -> int:
    from fsbarrier.network.this_host import user_at_host
    from fsbarrier.pool.queue import StopAsked

    state = pool.queue.jobs[number]
    if state.over:
        print(f"job {number} has already ended: {state.word}")
        return 0
    pool.append(StopAsked(number, user_at_host()))
    print(f"asked job {number} to stop")
    return 0
