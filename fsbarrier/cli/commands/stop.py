"""Stop all nodes of a run at the end of the current iteration, or immediately with --now. The run can be resumed."""

from __future__ import annotations

import argparse

from fsbarrier.cli.commands import flags
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.rundir.heartbeats import stop
from fsbarrier.wording import printable, ranks

# A node is considered alive if its heartbeat advances within this many beats. A starting node may need longer to write its first one.
BEATS, LEAST_S = 1.5, 5.0
EXAMPLE = "fsbarrier stop --log-path runs/default --now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, {"--now": "do not wait for the end of the iteration"})


def main(args: argparse.Namespace) -> int:
    record = flags.find_run(args)
    log_path = record.log_path
    try:
        watch_s = max(LEAST_S, BEATS * record.settings.coordination.beat_s)
        reached = stop(log_path, now=args.now, watch_s=watch_s)
    except PermissionError:
        raise UsageError(
            f"--log-path {log_path}: no write permission; this run belongs to {record.created_by}"
        ) from None
    except OSError as error:
        raise StoreError(f"{log_path}: cannot write the stop request: {error.strerror or error}") from None
    if not reached:
        print(
            f"no node of run {printable(record.run_id)} is alive, so there is nothing to stop; later starts are not affected"
        )
        return 0
    who = f"node{'s' if len(reached) > 1 else ''} {ranks(beat.rank for beat in reached)}"
    when = (
        "immediately"
        if args.now
        else "at the end of this iteration, at once if it waits for a lost node (--now: immediately)"
    )
    print(f"asked {who} of run {printable(record.run_id)} to stop {when}; check with `fsbarrier status`")
    return 0
