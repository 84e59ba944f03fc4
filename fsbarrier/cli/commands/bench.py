"""`fsbarrier bench`: measures barrier latency on this machine and filesystem, compared with a bare directory scan."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.store import owned

SUMMARY = "Measure barrier latency with N processes on this machine: daemons, scripts that use fsbarrier.join, and bare directory scans."
EXAMPLE = "fsbarrier bench --nodes 3 --path /shared/scratch"
PHASES = 14
# Bare scans are measured before and after everything else. If they differ by more than this factor, other load on the machine has
# disturbed the measurement.
DISTURBED = 1.5


FLAGS = {
    "--nodes N": "processes (default 3)",
    "--iterations K": "iterations of 14 barriers each (default 20)",
    "--path DIR": "measure on this directory's filesystem (default: the temporary directory)",
    "--json": "print JSON",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, FLAGS, nodes=3, iterations=20)


def main(args: argparse.Namespace) -> int:
    from fsbarrier.run import benchmark

    if args.nodes < 1:
        raise UsageError(f"--nodes {args.nodes}: must be 1 or more")
    if args.iterations < 2:
        raise UsageError(
            f"--iterations {args.iterations}: must be 2 or more, because the first iteration is not counted"
        )
    if args.path is not None and not args.path.is_dir():
        raise UsageError(f"--path {args.path}: not an existing directory")
    try:
        folder = Path(tempfile.mkdtemp(prefix="fsbarrier-bench-", dir=args.path))
    except OSError as error:
        raise UsageError(f"--path {args.path}: not writable: {error.strerror}") from None
    try:
        bare = benchmark.scripts("bare", folder / "bare", args.nodes, args.iterations * PHASES)
        group = benchmark.scripts("group", folder / "group", args.nodes, args.iterations * PHASES)
        ours = benchmark.ping(folder / "run", args.nodes, args.iterations)
        after = benchmark.scripts("bare", folder / "bare-after", args.nodes, args.iterations * PHASES)
    finally:
        owned.discard(folder)
    scan_s = (bare.median_s + after.median_s) / 2
    changed = max(bare.median_s, after.median_s) / min(bare.median_s, after.median_s)
    if args.json:
        measured = {"ping": ours, "join": group, "bare_scan": bare, "bare_scan_after": after}
        ratios = {
            "ratio_of_medians": ours.median_s / scan_s,
            "join_ratio_of_medians": group.median_s / scan_s,
        }
        figures = {name: asdict(one) for name, one in measured.items()}
        print(json.dumps({"nodes": args.nodes, **figures, **ratios, "disturbed": changed > DISTURBED}))
        return 0
    print(f"last arrival to last release, {args.nodes} processes on this machine, milliseconds")
    print(f"{'':<16}{'barriers':>10}{'median':>10}{'99 %':>10}{'max':>10}{'× scan':>10}")
    for name, one in (("bare scan", bare), ("join", group), ("daemons", ours), ("bare scan again", after)):
        times = "".join(f"{1000 * seconds:>10.2f}" for seconds in (one.median_s, one.p99_s, one.max_s))
        print(f"{name:<16}{one.barriers:>10}{times}{one.median_s / scan_s:>10.1f}")
    if changed > DISTURBED:
        print(
            f"the two bare scans differ by a factor of {changed:.1f}: other load on this machine disturbed the results"
        )
    return 0
