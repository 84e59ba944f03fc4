"""Add a run to a pool's queue. Accepts the flags and settings of `fsbarrier run`; the job starts in the current directory. Jobs run
in order of --priority, then of age.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.network.this_host import user_at_host

EXAMPLE = "fsbarrier submit /shared/pool --nodes 3 --data-path /data/math --model Qwen2.5-0.5B-Instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="POOL_DIR", help="the pool's directory")
    flags.add(parser, {"--name NAME": "name to show in lists"}, name="")
    priority = "jobs with a higher priority run first (default 0)"
    parser.add_argument("--priority", metavar="P", type=int, default=0, help=priority)
    flags.add_run_flags(parser)


def main(args: argparse.Namespace) -> int:
    from fsbarrier.pool import directory
    from fsbarrier.pool.queue import Job
    from fsbarrier.settings.resolve import resolve

    if args.dry_run:
        raise UsageError("--dry-run: not supported by submit; use fsbarrier run --dry-run")
    pool = directory.existing(preflight.absolute(args.pool))
    if args.shared_group:
        # It may be another member's, whose daemons run the job as that member. This command runs nothing that is there.
        pool.check_no_links()
    else:
        pool.check_private(shared_group=False)
    if ":" in (args.num_nodes or ""):
        raise UsageError(
            f"--num-nodes {args.num_nodes}: a pool's job gets all its nodes at once; give one number"
        )
    # Report a mistyped setting now instead of on a node an hour later.
    nodes = resolve(flags.gather(args)).num_nodes
    log_path = str(preflight.absolute(args.log_path)) if args.log_path else ""
    args.num_nodes = args.log_path = None
    words = flags.words_for_others(args, "submit")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    name = args.name or next((word for word in words if "=" not in word and word[0] != "-"), "run")
    job = Job(name, nodes, args.priority, words, str(Path.cwd()), log_path, user_at_host(), now)
    try:
        number = pool.submit(job)
    except UnicodeEncodeError as error:
        raise UsageError(f"submit: every argument must be valid UTF-8: {error}") from None
    print(
        f"queued job {number}; see `fsbarrier jobs {args.pool}` for its state and `fsbarrier jobs logs {args.pool} {number}` for its output"
    )
    return 0
