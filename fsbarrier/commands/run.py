"""`fsbarrier run`: this node of a run. Node 0 makes the run's record; the others need their rank and nothing else."""

from __future__ import annotations

import argparse
import os
from itertools import count
from pathlib import Path

from fsbarrier.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.start import preflight

SUMMARY = "Run this node: node 0 (--master) decides what the run is, the others (--worker R) take it from its record."
EXAMPLE = "fsbarrier run --master --num-nodes 3 --rank-weights 1,1,1 rollout.temperature=0.8\n  fsbarrier run --worker 2"
DEMO_NODES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master", action="store_true", help="this is node 0")
    parser.add_argument(
        "--worker",
        metavar="R",
        type=flags.whole_number,
        help="this is node R (else NODE_RANK, SLURM_NODEID, ...)",
    )
    parser.add_argument(
        "--rank",
        choices=["auto"],
        help="take a rank that is free; this host's own where it had one",
    )
    parser.add_argument(
        "--demo", action="store_true", help="three nodes on this machine, the built-in task, six iterations"
    )
    flags.add_run_flags(parser)


def main(args: argparse.Namespace) -> int:
    chosen = flags.gather(args)
    if args.json and not args.dry_run:
        raise UsageError("--json: only with --dry-run; `fsbarrier status --json` shows a run")
    if args.worker == 0:
        # Node 0 alone makes the run's record, so that a worker 0 would wait for itself.
        raise UsageError("--worker 0: node 0 is started with --master")
    if args.rank and (args.master or args.worker is not None):
        raise UsageError("--rank auto: --master and --worker R name a rank; drop one of the two")
    if args.demo:
        return _demo(args, chosen)
    from fsbarrier.start import begin

    request = begin.Request(
        chosen=chosen,
        environ=os.environ,
        master=args.master,
        worker=args.worker,
        any_rank=args.rank is not None,
        resume=args.resume,
        dry_run=args.dry_run,
    )
    start = begin.begin(request, flags.say)
    if args.dry_run:
        from fsbarrier.start import dryrun

        return dryrun.show(start.record, start.settings, as_json=args.json)
    from fsbarrier.node.run_node import run_node
    from fsbarrier.start import filesystem

    def joined(rank: int) -> None:
        if args.rank:
            flags.say(f"--rank auto: this is node {rank}")
        filesystem.record(start.mount, start.record.paths, rank)

    rank = None if args.rank else start.node_rank
    return run_node(
        start.record, start.settings, start.stated, node_rank=rank, until=start.until, joined=joined
    )


# --- the demo -------------------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace, chosen: tuple[ChosenValue, ...]) -> int:
    """The built-in task on three nodes of this machine; an unfinished demo goes on."""
    from fsbarrier.data.demo_tasks import DEMO_SETTINGS
    from fsbarrier.launchers import local

    if args.master or args.worker is not None or args.rank:
        raise UsageError("--demo: starts all its nodes itself; drop --master, --worker and --rank")
    for item in chosen:
        if item.key in ("data_path", "model"):
            raise UsageError(f"{item.source}: the demo has its own task and model; drop it or drop --demo")
    if not any(item.key == "log_path" for item in chosen):
        path = demo_path(preflight.default_log_path(os.environ).parent)
        chosen = (*chosen, ChosenValue("log_path", str(path), "--log-path"))
    defaults = {"num_nodes": DEMO_NODES, **DEMO_SETTINGS}
    leave_other_runs_alone(chosen)
    return local.run_all(chosen, defaults, args, flags.say)


def leave_other_runs_alone(chosen: tuple[ChosenValue, ...]) -> None:
    """Raises UsageError where the run directory has a run that no demo made: `--demo` would go on with it."""
    from fsbarrier.rundir import runrecord

    by_key = {item.key: item.value for item in chosen}
    log_path = preflight.absolute(str(by_key["log_path"]))
    if not runrecord.exists(log_path):
        return
    recorded = runrecord.load(log_path).settings
    own_data = recorded.data_path not in (None, str(RunPaths(log_path).demo))
    if own_data or recorded.program != by_key.get("program", "rl"):
        raise UsageError(
            f"--demo: {log_path} is a run of your own; name another --log-path, or drop --demo to go on with it"
        )


def demo_path(runs: Path) -> Path:
    """The first of demo, demo-2, demo-3, ... in `runs` that is new or unfinished."""
    numbered = (runs / ("demo" if number == 1 else f"demo-{number}") for number in count(1))
    return next(path for path in numbered if not is_finished(path))


def is_finished(log_path: Path) -> bool:
    """Whether the run there has done all its iterations, as its nodes' last heartbeats say."""
    from fsbarrier.rundir.heartbeats import read_beats

    try:
        return any(beat.state == "finished" for beat in read_beats(log_path).values())
    except OSError:
        return False
