"""Measure barrier latency with N daemons on this machine: the times from last arrival to last release, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import barrier_latency as benchmark

from fsbarrier.cli.commands import flags
from fsbarrier.errors import FsbarrierError, UsageError

FLAGS = {
    "--nodes N": "daemons (default 3)",
    "--iterations K": "iterations of 14 barriers each, of which the first is not counted (default 20)",
    "--path DIR": "measure on this directory's filesystem (default: the temporary directory)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, FLAGS, nodes=3, iterations=20)


def main(args: argparse.Namespace) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="fsbarrier-bench-", dir=args.path) as folder:
            passed = benchmark.ping(Path(folder) / "run", args.nodes, args.iterations)
    except OSError as error:
        raise UsageError(f"--path {args.path}: {error.strerror}") from None
    print(json.dumps({"nodes": args.nodes, **asdict(passed)}))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    try:
        sys.exit(main(parser.parse_args()))
    except FsbarrierError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
