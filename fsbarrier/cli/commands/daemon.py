"""Add this node to a pool and run one job at a time, until Ctrl-C. A pool is a directory shared by all of its nodes. To run two jobs
at once on one machine, start two daemons with different CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import argparse
import os

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight, ranks
from fsbarrier.errors import UsageError
from fsbarrier.protocol.membership import DEAD_S

EXAMPLE = "fsbarrier daemon /shared/pool"
FLAGS = {
    "--dead S": f"seconds without a heartbeat after which another node is considered dead (default {DEAD_S:g})",
    "--shared-group": "let the owner's group submit jobs, which run under your account",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="POOL_DIR", help="the pool's directory; created if it does not exist")
    flags.add(parser, FLAGS, dead=DEAD_S)


def main(args: argparse.Namespace) -> int:
    if not 0.5 <= args.dead <= 86400:
        raise UsageError(f"--dead {args.dead:g}: must be between 0.5 and 86400 seconds")
    from fsbarrier.pool.daemon import serve

    root = preflight.absolute(args.pool)
    preflight.check_log_path(root, named="daemon")
    return serve(root, args.dead, args.shared_group, ranks.without_launchers(os.environ), flags.say)
