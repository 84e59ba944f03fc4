"""Check whether a directory can support a run; exits with code 3 if not. On several nodes at once: also measure how late they see
each other's files.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
from dataclasses import asdict
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import ranks
from fsbarrier.doctor import examine
from fsbarrier.doctor.findings import Level, Report
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.processes.signals import end, ending_signals_handled

EXAMPLE = "fsbarrier doctor /shared/runs\n  fsbarrier doctor /shared/runs --num-nodes 3 --worker 1      (on each node, with its rank)"
MARKS = {
    Level.OK: "[green]ok[/]",
    Level.NOTE: "note",
    Level.WARNING: "[yellow]warning[/]",
    Level.REFUSED: "[red]refused[/]",
}


FLAGS = {
    "--num-nodes N": "number of nodes that run this command at about the same time, on the same directory",
    "--master": "this is node 0",
    "--worker R": "this is node R (default: the rank that a launcher gives, such as Slurm)",
    "--wait S": "seconds to wait for the other nodes (default 60)",
    "--shared-group": "trust the group of the directory, as for a run with this flag",
    "--trust-mount": "trust a mount that sets all modes itself, as for a run with this flag",
    "--self": "check this machine and its environment instead: packages, imports, limits, shared memory, the clock",
    "--json": "print JSON",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, help="an existing directory on the filesystem to check")
    flags.add(parser, FLAGS, wait=examine.WAIT_S)


def main(args: argparse.Namespace) -> int:
    if args.self:
        return _self(args)
    if args.path is None:
        raise UsageError("doctor: name an existing directory, or give --self to check this machine")
    if not args.path.is_dir():
        raise UsageError(f"{args.path} is not an existing directory")
    if not 0 < args.wait <= 86400:
        raise UsageError(f"--wait {args.wait:g}: must be more than 0 and at most 86400 seconds")
    rank = ranks.node_rank(
        master=args.master, worker=args.worker, environ=os.environ, num_nodes=args.num_nodes
    )
    count = args.num_nodes
    if count is None and (by_launcher := ranks.count_nodes(rank, os.environ)) is not None:
        count = by_launcher.value
    if count == 0:
        raise UsageError("--num-nodes 0: must be 1 or more")
    known, several = args.master or args.worker is not None, count is not None and count > 1
    if (known and count is None) or (several and rank is None):
        raise UsageError(
            "doctor on several nodes: give --num-nodes N, and on each node --master (node 0) or --worker R"
        )
    try:
        with ending_signals_handled(end):
            if count is None or count == 1 or rank is None:
                report = examine.alone(args.path)
            else:
                report = examine.together(
                    args.path,
                    count,
                    rank.value,
                    wait_s=args.wait,
                    shared_group=args.shared_group,
                    trust_mount=args.trust_mount,
                    say=flags.say,
                )
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UsageError(f"{args.path}: not writable ({error.strerror})") from None
        raise StoreError(f"{args.path}: {error}") from None
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report)
    return StoreError.exit_code if report.refused else 0


def _self(args: argparse.Namespace) -> int:
    """`--self`: one line for each finding."""
    from fsbarrier.doctor import machine
    from fsbarrier.doctor.findings import REFUSED

    checks = machine.full(args.path or Path.cwd())
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            print(f"{check.level:<8} {check.name}: {check.with_advice}")
    return UsageError.exit_code if any(check.level == REFUSED for check in checks) else 0


def show(report: Report) -> None:
    """Print the report as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"fsbarrier doctor {escape(report.path)}", title_justify="left")
    for name in ("check", "", "finding"):
        table.add_column(name, overflow="fold")
    for check in report.checks:
        advice = f"\n→ {check.advice}" if check.advice else ""
        table.add_row(check.name, MARKS[check.level], escape(check.finding + advice))
    console = Console()
    console.print(table)
    console.print(f"Class: {report.category}. Proven {report.proven}.", markup=False)
    if report.refused:
        names = ", ".join(check.name for check in report.refused)
        console.print(f"[red]This directory cannot support a run[/]: {escape(names)}.")
        return
    console.print("[green]This directory can support a run.[/]")
