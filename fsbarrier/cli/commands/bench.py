"""`fsbarrier bench`: measures barrier latency on this machine and filesystem."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.store import owned

SUMMARY = "Measure barrier latency with N daemons on this machine."
EXAMPLE = "fsbarrier bench --nodes 3 --path /shared/scratch"


FLAGS = {
    "--nodes N": "daemons (default 3)",
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
    if args.path is not None and not Path(args.path).is_dir():
        raise UsageError(f"--path {args.path}: not an existing directory")
    try:
        folder = Path(tempfile.mkdtemp(prefix="fsbarrier-bench-", dir=args.path))
    except OSError as error:
        raise UsageError(f"--path {args.path}: not writable: {error.strerror}") from None
    try:
        passed = benchmark.ping(folder / "run", args.nodes, args.iterations)
    finally:
        owned.discard(folder)
    if args.json:
        print(json.dumps({"nodes": args.nodes, **asdict(passed)}))
        return 0
    print(f"last arrival to last release, {args.nodes} daemons on this machine, milliseconds")
    print(f"{'barriers':>10}{'median':>10}{'99 %':>10}{'max':>10}")
    times = "".join(f"{1000 * seconds:>10.2f}" for seconds in (passed.median_s, passed.p99_s, passed.max_s))
    print(f"{passed.barriers:>10}{times}")
    return 0
