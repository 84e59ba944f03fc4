"""Run any command so that everything it starts ends with it, whatever these processes do, and also when whoever started this is killed.

The exit code is the command's."""

from __future__ import annotations

import argparse

from fsbarrier.errors import UsageError
from fsbarrier.processes import guarded_command

EXAMPLE = "fsbarrier guard -- torchrun --nproc-per-node 8 train.py"
TAKES_A_COMMAND = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [--grace S] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("misplaced", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="S",
        help="after Ctrl-C or another signal that ends this, kill what is left after S seconds (default: 5)",
    )


def main(args: argparse.Namespace) -> int:
    if args.misplaced:
        raise UsageError(
            f"{args.misplaced[0]}: write the command after two dashes: fsbarrier guard -- COMMAND"
        )
    if not args.command or not args.command[0]:
        raise UsageError("give a command: fsbarrier guard -- COMMAND")
    if not 0 <= args.grace < float("inf"):
        raise UsageError(f"--grace {args.grace}: must be 0 or more seconds")
    return guarded_command.run(args.command, args.grace)
