"""`fsbarrier stop`: asks all nodes of a run to end, from any machine that sees its directory."""

from __future__ import annotations

import argparse

from fsbarrier.commands import flags
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.printable import printable
from fsbarrier.rundir.heartbeats import live_nodes
from fsbarrier.rundir.stop_requests import request_stop
from fsbarrier.view.amounts import ranks

SUMMARY = "Ask all nodes of a run to end: at the next start of an iteration, or at once with --now. It can be started again."
# For so many beats `stop` watches a heartbeat to see whether a node is alive.
BEATS = 1.5
EXAMPLE = "fsbarrier stop --log-path runs/default --now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument("--now", action="store_true", help="do not wait for the next start of an iteration")


def main(args: argparse.Namespace) -> int:
    record = flags.find_run(args)
    log_path = record.log_path
    try:
        request_stop(log_path, now=args.now)
    except PermissionError:
        raise UsageError(
            f"--log-path {log_path}: this run belongs to {record.created_by}; you may not write there"
        ) from None
    except OSError as error:
        raise StoreError(f"{log_path}: the request cannot be written: {error.strerror or error}") from None
    alive = live_nodes(log_path, BEATS * record.settings.coordination.beat_s)
    if not alive:
        print(
            f"no node of run {printable(record.run_id)} is alive: nothing is left to end; a later start is not affected"
        )
        return 0
    who = f"node{'s' if len(alive) > 1 else ''} {ranks(beat.rank for beat in alive)}"
    when = "at once" if args.now else "before another iteration begins (--now: at once)"
    print(
        f"asked {who} of run {printable(record.run_id)} to end {when}; `fsbarrier status` shows when they have"
    )
    return 0
