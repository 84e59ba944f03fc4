"""`fsbarrier daemon POOL_DIR`: this machine becomes a node of a pool, and runs what is submitted there."""

from __future__ import annotations

import argparse

from fsbarrier.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.protocol.timing import DEAD_S
from fsbarrier.start import preflight

SUMMARY = (
    "Offer this node to a pool: run one node of one job at a time, until Ctrl-C. The pool is a directory that all of its nodes share. "
    "For two jobs at once on one machine start two daemons, with CUDA_VISIBLE_DEVICES apart."
)
EXAMPLE = "fsbarrier daemon /shared/pool"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pool", metavar="POOL_DIR", help="the pool's directory; it is made where there is none"
    )
    parser.add_argument(
        "--dead",
        metavar="S",
        type=float,
        default=DEAD_S,
        help=f"seconds without a sign of life after which another node counts as gone (default {DEAD_S:g})",
    )
    parser.add_argument(
        "--shared-group", action="store_true", help="let the group submit jobs, which then run as you"
    )


def main(args: argparse.Namespace) -> int:
    if not 0.5 <= args.dead <= 86400:
        raise UsageError(f"--dead {args.dead:g}: must be seconds, 0.5 at least and at most a day")
    from fsbarrier.pool.daemon import serve

    return serve(preflight.absolute(args.pool), args.dead, args.shared_group, flags.say)
