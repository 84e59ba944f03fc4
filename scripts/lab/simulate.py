"""Run the real protocol code under injected faults, in virtual time: one schedule per seed, checked against the invariants."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import lab_command
from sim.campaign import SeedVerdict, campaign, make_world, violations_in
from sim.setup import KINDS, Setup, parse_mix
from sim.transcript import transcript, violations

from fsbarrier.cli.commands import flags
from fsbarrier.errors import EXIT_INTERNAL, UsageError
from fsbarrier.wording import counted

#: maximum number of failing seeds to print
SHOWN = 10


KINDS_TEXT = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
FLAGS = {
    "--nodes N": "nodes per schedule (default 3)",
    "--seeds K": "number of schedules to run (default 1000)",
    "--first-seed N": "first seed (default 0)",
    "--iterations N": "iterations of 14 phases each (default: drawn)",
    "--faults LIST": f"all, none, or a comma-separated list of faults. {KINDS_TEXT}",
    "--jobs N": "parallel processes (default 1)",
    "--trace N": "run only this seed and print its history",
    "--groups": "simulate groups (fsbarrier.join) with random calls instead of runs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, FLAGS, nodes=3, seeds=1000, first_seed=0, iterations=0, faults="all", jobs=1)


def main(args: argparse.Namespace) -> int:
    for name, least in (("nodes", 1), ("seeds", 1), ("iterations", 0), ("jobs", 1), ("first_seed", 0)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be {least} or more")
    setup = Setup(
        nodes=args.nodes, iterations=args.iterations, mix=parse_mix(args.faults), groups=args.groups
    )
    if args.trace is not None:
        return _trace(args.trace, setup)
    began, virtual_s = time.monotonic(), 0.0
    failed: list[SeedVerdict] = []
    # number of schedules with a fault of each kind
    struck, reached = Counter[str](), Counter[str]()
    for verdict in campaign(range(args.first_seed, args.first_seed + args.seeds), setup, args.jobs):
        struck.update(verdict.struck)
        reached.update(verdict.reached)
        virtual_s += verdict.virtual_s
        failed += [verdict] if verdict.violations else []
    seconds = time.monotonic() - began
    for verdict in failed[:SHOWN]:
        for violation in verdict.violations[:3]:
            print(f"seed {verdict.seed}: {violation.number}: {violation.what}")
    if len(failed) > SHOWN:
        print(f"... and {len(failed) - SHOWN} more seeds")
    hours, rate = f"{virtual_s / 3600:.1f} hours of virtual time", f"{args.seeds / seconds:.0f}"
    print(
        f"{counted(args.seeds, 'schedule')} of {counted(args.nodes, 'node')}, {hours}, in {seconds:.1f} s ({rate} schedules a second)"
    )
    for title, counts in (("faults", struck), ("reached", reached)):
        print(f"{title}: {', '.join(f'{kind} {count}' for kind, count in sorted(counts.items())) or 'none'}")
    if not failed:
        print("every invariant held in all of them")
        return 0
    print(f"{len(failed)} violated an invariant; to replay the first: {_replay(args, failed[0].seed)}")
    return EXIT_INTERNAL


def _trace(seed: int, setup: Setup) -> int:
    world = make_world(seed, setup)
    history = world.run()
    found = violations_in(world)
    rules = world.rules
    print(
        f"seed {seed}: {counted(setup.nodes, 'node')}, --on-node-failure {rules.on_node_failure}, --min-nodes {rules.min_nodes}"
    )
    print(f"mounts: {world.draw.habits}; directory times in steps of {world.disk.coarse_s:g} s")
    print(transcript(history), end="")
    print(violations(found) or "every invariant held")
    return EXIT_INTERNAL if found else 0


def _replay(args: argparse.Namespace, seed: int) -> str:
    """The command that replays one seed."""
    schedule = f"--nodes {args.nodes} --iterations {args.iterations} --faults {args.faults}"
    return f"python scripts/lab/simulate.py {schedule}{' --groups' if args.groups else ''} --trace {seed}"


if __name__ == "__main__":
    sys.exit(lab_command.run(__doc__, add_arguments, main))
