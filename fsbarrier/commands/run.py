"""`fsbarrier run`: this node of a run. Node 0 makes the run's record; the others need their rank and nothing else."""

from __future__ import annotations

import argparse
import os

from fsbarrier.commands import flags
from fsbarrier.errors import UsageError

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
    chosen = flags.gather(args)
    if args.json and not args.dry_run:
        raise UsageError("--json: only with --dry-run; `fsbarrier status --json` shows a run")
    if args.demo:
        if args.master or args.worker is not None:
            raise UsageError("--demo: starts all its nodes itself; drop --master and --worker")
        from fsbarrier.commands import launch

        return launch.demo(args, chosen)
    from fsbarrier.start import startup

    request = startup.Request(
        chosen=chosen,
        environ=os.environ,
        master=args.master,
        worker=args.worker,
        resume=args.resume,
        dry_run=args.dry_run,
    )
    start = startup.begin(request, flags.say)
    if args.dry_run:
        from fsbarrier.start import dryrun

        return dryrun.show(start.record, start.settings, as_json=args.json)
    from fsbarrier.node.daemon import run_node
    from fsbarrier.start import filesystem

    filesystem.record(start.mount, start.record.paths, start.node_rank)
    return run_node(start.record, start.settings, node_rank=start.node_rank, until=start.until, console=True)
