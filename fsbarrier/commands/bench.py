"""`fsbarrier bench`: how fast barriers are on this machine and filesystem, beside a bare directory scan."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from fsbarrier.commands import flags
from fsbarrier.errors import UsageError

SUMMARY = "Measure barriers on this machine: N daemons of the program ping, N scripts that fsbarrier.join, N bare directory scans."
EXAMPLE = "fsbarrier bench --nodes 3 --path /shared/scratch"
PHASES = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", metavar="N", type=flags.whole_number, default=3, help="processes (default 3)"
    )
    parser.add_argument(
        "--iterations", metavar="K", type=flags.whole_number, default=20, help="of 14 barriers (default 20)"
    )
    parser.add_argument(
        "--path", metavar="DIR", type=Path, help="measure on this directory's filesystem (default: temporary)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    from fsbarrier.maintenance import benchmark

    if args.nodes < 1:
        raise UsageError(f"--nodes {args.nodes}: must be 1 or more")
    if args.iterations < 2:
        raise UsageError(
            f"--iterations {args.iterations}: must be 2 or more, as the first one is not counted"
        )
    if args.path is not None and not args.path.is_dir():
        raise UsageError(f"--path {args.path}: not an existing directory")
    try:
        folder = Path(tempfile.mkdtemp(prefix="fsbarrier-bench-", dir=args.path))
    except OSError as error:
        raise UsageError(f"--path {args.path}: cannot be written: {error.strerror}") from None
    try:
        bare = benchmark.scripts("bare", folder / "bare", args.nodes, args.iterations * PHASES)
        group = benchmark.scripts("group", folder / "group", args.nodes, args.iterations * PHASES)
        ours = benchmark.ping(folder / "run", args.nodes, args.iterations)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratio = ours.median_s / bare.median_s
    if args.json:
        measured = {"ping": asdict(ours), "join": asdict(group), "bare_scan": asdict(bare)}
        print(json.dumps({"nodes": args.nodes, **measured, "ratio_of_medians": ratio}))
        return 0
    print(f"last arrival to last release, {args.nodes} processes on this machine, milliseconds")
    print(f"{'':<12}{'barriers':>10}{'median':>10}{'99 %':>10}{'max':>10}")
    for name, one in (("daemons", ours), ("join", group), ("bare scan", bare)):
        figures = "".join(f"{1000 * seconds:>10.2f}" for seconds in (one.median_s, one.p99_s, one.max_s))
        print(f"{name:<12}{one.barriers:>10}{figures}")
    print(f"the medians of daemons and bare scan are in the ratio {ratio:.1f}")
    return 0
