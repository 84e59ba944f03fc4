"""Run this node. Node 0 (--master) defines the run; the other nodes (--worker R) read its record."""

from __future__ import annotations

import argparse
import os
from itertools import count
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sources import ChosenValue

EXAMPLE = "fsbarrier run --master --num-nodes 3 --rank-weights 1,1,1 rollout.temperature=0.8\n  fsbarrier run --worker 2"
DEMO_NODES = 3


FLAGS = {
    "--master": "this is node 0",
    "--worker R": "this is node R (default: from NODE_RANK, SLURM_NODEID, ...)",
    "--demo": "run the built-in task for six iterations with three nodes on this machine",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, FLAGS)
    rank = "take a free rank, or the rank that this host had before"
    parser.add_argument("--rank", choices=["auto"], help=rank)
    flags.add_run_flags(parser)


def main(args: argparse.Namespace) -> int:
    chosen = flags.gather(args)
    if args.json and not args.dry_run:
        raise UsageError("--json: only valid with --dry-run; to inspect a run use `fsbarrier status --json`")
    if args.worker == 0:
        # Only node 0 creates the run's record, so a worker 0 would wait for itself.
        raise UsageError("--worker 0: start node 0 with --master")
    if args.rank and (args.master or args.worker is not None):
        raise UsageError("--rank auto: contradicts --master and --worker R; drop one of the two")
    if args.demo:
        return _demo(args, chosen)
    from fsbarrier.cli.start import begin, ranks

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
        from fsbarrier.cli.start import dryrun

        return dryrun.show(start.record, start.settings, as_json=args.json)
    from fsbarrier.run.run_node import run_node

    for name in os.environ.keys() - ranks.without_torchruns(os.environ).keys():
        del os.environ[name]
    rank = None if args.rank else start.node_rank
    return run_node(start.record, start.settings, start.stated, node_rank=rank, until=start.until)


# --- the demo -------------------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace, chosen: tuple[ChosenValue, ...]) -> int:
    """Run the built-in task on three nodes of this machine, or resume an unfinished demo."""
    from fsbarrier.cli.launchers import local
    from fsbarrier.data.demo_tasks import DEMO_SETTINGS

    if args.master or args.worker is not None or args.rank:
        raise UsageError("--demo: starts all of its nodes itself; drop --master, --worker and --rank")
    for item in chosen:
        if item.key in ("data_path", "model"):
            raise UsageError(f"{item.source}: the demo uses its own task and model; drop this or drop --demo")
    if not any(item.key == "log_path" for item in chosen):
        path = demo_path(preflight.default_log_path(os.environ).parent)
        chosen = (*chosen, ChosenValue("log_path", str(path), "--log-path"))
    defaults = {"num_nodes": DEMO_NODES, **DEMO_SETTINGS}
    leave_other_runs_alone(chosen)
    return local.run_all(chosen, defaults, args, flags.say)


def leave_other_runs_alone(chosen: tuple[ChosenValue, ...]) -> None:
    """Raises UsageError if the directory contains a run that is not a demo, because `--demo` would resume it."""
    from fsbarrier.rundir import runrecord

    by_key = {item.key: item.value for item in chosen}
    log_path = preflight.absolute(str(by_key["log_path"]))
    if not runrecord.exists(log_path):
        return
    recorded = runrecord.load(log_path).settings
    own_data = recorded.data_path not in (None, str(RunPaths(log_path).demo))
    if own_data or recorded.program != by_key.get("program", "rl"):
        raise UsageError(
            f"--demo: {log_path} contains a run that is not a demo; use another --log-path, or drop --demo to resume it"
        )


def demo_path(runs: Path) -> Path:
    """The first of demo, demo-2, demo-3, ... in `runs` that is new or unfinished."""
    numbered = (runs / ("demo" if number == 1 else f"demo-{number}") for number in count(1))
    return next(path for path in numbered if not is_finished(path))


def is_finished(log_path: Path) -> bool:
    """Whether the run has completed all iterations, according to its nodes' last heartbeats."""
    from fsbarrier.rundir.heartbeats import read_beats

    try:
        return any(beat.state == "finished" for beat in read_beats(log_path).values())
    except OSError:
        return False
