"""`fsbarrier simulate`: the protocol's own code under faults, in virtual time; every seed is a schedule that can be replayed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fsbarrier.commands import flags
from fsbarrier.errors import EXIT_INTERNAL, UsageError
from fsbarrier.sim.campaign import Verdict, campaign
from fsbarrier.sim.faults import KINDS, parse_mix
from fsbarrier.sim.invariants import check
from fsbarrier.sim.setup import Setup
from fsbarrier.sim.transcript import transcript, violations
from fsbarrier.sim.world import World

SUMMARY = "Run the protocol's own code under faults, in virtual time: one schedule a seed, each checked against the invariants."
EXAMPLE = "fsbarrier simulate --nodes 8 --seeds 10000"
SHOWN = 10  # failing seeds that are told in full


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = flags.whole_number
    parser.add_argument(
        "--nodes", metavar="N", type=number, default=3, help="nodes in a schedule (default 3)"
    )
    parser.add_argument(
        "--seeds", metavar="K", type=number, default=1000, help="schedules to run (default 1000)"
    )
    parser.add_argument(
        "--first-seed", metavar="S", type=number, default=0, help="the first of them (default 0)"
    )
    parser.add_argument("--iterations", metavar="I", type=number, default=1, help="of 14 phases (default 1)")
    kinds = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    parser.add_argument(
        "--faults", metavar="LIST", default="all", help=f"all, none, or names with commas. {kinds}"
    )
    parser.add_argument(
        "--jobs", metavar="J", type=number, default=1, help="processes that share the work (default 1)"
    )
    parser.add_argument(
        "--trace", metavar="SEED", type=number, help="tell the story of one seed, and run no other"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    for name, least in (("nodes", 1), ("seeds", 1), ("iterations", 1), ("jobs", 1), ("first_seed", 0)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be {least} or more")
    setup = Setup(nodes=args.nodes, iterations=args.iterations, mix=parse_mix(args.faults))
    if args.trace is not None:
        return _trace(args.trace, setup)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    began = time.monotonic()
    failed: list[Verdict] = []
    struck: Counter[str] = Counter()
    virtual_s = 0.0
    with _progress(len(seeds), hidden=args.json) as advance:
        for verdict in campaign(seeds, setup, args.jobs):
            struck.update(verdict.struck)
            virtual_s += verdict.virtual_s
            if verdict.violations:
                failed.append(verdict)
            next(advance)
    seconds = time.monotonic() - began
    report = _json if args.json else _plain
    report(args, failed, struck, virtual_s, seconds)
    return EXIT_INTERNAL if failed else 0


def _trace(seed: int, setup: Setup) -> int:
    world = World(seed, setup)
    history = world.run()
    found = check(world)
    rules = world.rules
    print(
        f"seed {seed}: {setup.nodes} nodes, --on-node-failure {rules.on_node_failure}, --min-nodes {rules.min_nodes}"
    )
    print(f"mounts: {world.habits}; directory times in steps of {world.disk.coarse_s:g} s")
    print(transcript(history, every_row=True), end="")
    print(violations(found) or "every invariant held")
    return EXIT_INTERNAL if found else 0


def _plain(
    args: argparse.Namespace, failed: list[Verdict], struck: Counter[str], virtual_s: float, seconds: float
) -> None:
    for verdict in failed[:SHOWN]:
        for violation in verdict.violations[:3]:
            print(f"seed {verdict.seed}: {violation.number}: {violation.what}")
    if len(failed) > SHOWN:
        print(f"... and {len(failed) - SHOWN} more seeds")
    rate = f"{args.seeds / seconds:.0f} schedules a second"
    print(
        f"{args.seeds} schedules of {args.nodes} nodes, {virtual_s / 3600:.1f} hours of their time, in {seconds:.1f} s ({rate})"
    )
    print("faults: " + (", ".join(f"{kind} {count}" for kind, count in sorted(struck.items())) or "none"))
    if failed:
        print(f"{len(failed)} broke an invariant; to see one: {_replay(args, failed[0].seed)}")
    else:
        print("every invariant held in all of them")


def _json(
    args: argparse.Namespace, failed: list[Verdict], struck: Counter[str], virtual_s: float, seconds: float
) -> None:
    shown = [
        {
            "seed": verdict.seed,
            "violations": [violation._asdict() for violation in verdict.violations],
            "replay": _replay(args, verdict.seed),
        }
        for verdict in failed
    ]
    result = {
        "nodes": args.nodes,
        "iterations": args.iterations,
        "faults": sorted(parse_mix(args.faults)),
        "first_seed": args.first_seed,
        "seeds": args.seeds,
        "failed": shown,
        "struck": dict(sorted(struck.items())),
        "virtual_s": round(virtual_s, 1),
        "seconds": round(seconds, 3),
    }
    print(json.dumps(result))


def _replay(args: argparse.Namespace, seed: int) -> str:
    """The command that tells one seed's story."""
    words = [
        "fsbarrier simulate",
        f"--nodes {args.nodes}",
        f"--iterations {args.iterations}",
        f"--faults {args.faults}",
    ]
    return " ".join([*words, f"--trace {seed}"])


@contextmanager
def _progress(total: int, *, hidden: bool) -> Iterator[Iterator[None]]:
    """A bar on a terminal's stderr; `next` is one schedule more."""
    if hidden or not sys.stderr.isatty():
        yield iter(lambda: None, 0)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("schedules", total=total)

        def steps() -> Iterator[None]:
            while True:
                bar.advance(task)
                yield

        yield steps()
