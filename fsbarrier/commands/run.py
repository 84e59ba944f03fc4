"""`fsbarrier run`: this node of a run. Node 0 makes the run's record; the others need their rank and nothing else."""

from __future__ import annotations

import argparse
import json
import os
import sys

from fsbarrier.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.start.runrecord import RunRecord

SUMMARY = "Run this node: node 0 (--master) decides what the run is, the others (--worker R) take it from its record."
EXAMPLE = "fsbarrier run --master --num-nodes 3 --rank-weights 1,1,1 rollout.temperature=0.8\n  fsbarrier run --worker 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master", action="store_true", help="this is node 0")
    parser.add_argument(
        "--worker",
        metavar="R",
        type=flags.whole_number,
        help="this is node R (else NODE_RANK, SLURM_NODEID, ...)",
    )
    parser.add_argument(
        "--demo", action="store_true", help="three nodes on this machine, the built-in task, six iterations"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the settings and every node's commands; start nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    flags.add_run_flags(parser)


def main(args: argparse.Namespace) -> int:
    given = flags.gather(args)
    if args.json and not args.dry_run:
        raise UsageError("--json: only with --dry-run; `fsbarrier status --json` shows a run")
    if args.demo:
        if args.master or args.worker is not None:
            raise UsageError("--demo: starts all its nodes itself; drop --master and --worker")
        from fsbarrier.commands import launch

        return launch.demo(args, given)
    from fsbarrier.start import startup

    request = startup.Request(
        given=given,
        environ=os.environ,
        master=args.master,
        worker=args.worker,
        resume=args.resume,
        dry_run=args.dry_run,
    )
    start = startup.begin(request, say)
    if args.dry_run:
        return show(start.record, as_json=args.json)
    from fsbarrier.node.daemon import run_node

    return run_node(start.record, node_rank=start.node_rank, until=start.until, console=True)


def say(line: str) -> None:
    """Tell the user what takes long."""
    print(f"fsbarrier: {line}", file=sys.stderr, flush=True)


def show(record: RunRecord, *, as_json: bool) -> int:
    """Print what a run would be and would start; nothing is written anywhere."""
    from fsbarrier.start.dryrun import describe
    from fsbarrier.start.given import flatten

    commands = list(describe(record))
    if as_json:
        keys = ("node_rank", "phase", "phase_name", "command")
        listed = [dict(zip(keys, row, strict=True)) for row in commands]
        print(
            json.dumps(
                {
                    "settings": record.settings,
                    "tasks": record.tasks,
                    "model": record.model,
                    "commands": listed,
                }
            )
        )
        return 0
    print(f"# settings (digest {record.settings_digest[:12]})")
    for key, value in flatten(record.settings, ()).items():
        print(f"{key} = {json.dumps(value)}")
    for split, source in record.tasks.items():
        print(f"# {split}: {source['count']} tasks in {source['path']}")
    for node_rank in range(record.settings["num_nodes"]):
        print(f"\n# node {node_rank}")
        for rank, index, name, command in commands:
            if rank == node_rank:
                print(f"{index:2d} {name:<18} {command}")
    return 0
