"""`fsbarrier doctor PATH`: can this directory carry a run? Exit code 3 where it cannot."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from fsbarrier.errors import StoreError, UsageError
from fsbarrier.maintenance import doctor

SUMMARY = "probe a directory: can it carry a run?"
EXAMPLE = "fsbarrier doctor /shared/runs"
MARKS = {"ok": "[green]ok[/]", "note": "note", "warning": "[yellow]warning[/]", "refused": "[red]refused[/]"}
ALONE = (
    "Proven from this node alone. What other nodes see, and how late, takes several nodes to measure: "
    "not part of this version."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="an existing directory on the filesystem in question")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    if not args.path.is_dir():
        raise UsageError(f"{args.path} is not an existing directory")
    try:
        checks = doctor.examine(args.path)
    except PermissionError as error:
        raise UsageError(f"{args.path}: not writable ({error.strerror})") from None
    except OSError as error:
        raise StoreError(f"{args.path}: {error}") from None
    refused = [check for check in checks if check.level == "refused"]
    if args.json:
        report = {
            "path": str(args.path),
            "fit": not refused,
            "checks": [asdict(check) for check in checks],
            "note": ALONE,
        }
        print(json.dumps(report, indent=2))
    else:
        show(args.path, checks, fit=not refused)
    return StoreError.exit_code if refused else 0


def show(path: Path, checks: list[doctor.Check], *, fit: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"fsbarrier doctor {path}", title_justify="left")
    for name in ("check", "", "finding"):
        table.add_column(name, overflow="fold")
    for check in checks:
        advice = f"\n→ {check.advice}" if check.advice else ""
        table.add_row(check.name, MARKS[check.level], escape(check.finding + advice))
    console = Console()
    console.print(table)
    console.print("This directory can carry a run." if fit else "[red]This directory cannot carry a run.[/]")
    console.print(ALONE)
