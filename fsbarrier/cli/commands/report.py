"""Write a run's rewards, timings and events as one self-contained HTML file. The run may still be in progress."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.store import files

EXAMPLE = """fsbarrier report --log-path runs/default --out report.html
  fsbarrier report --csv table.csv --perfetto trace.json"""

FORMATS = {
    "--csv": "write a table of the iterations",
    "--perfetto": "write a trace of all nodes for ui.perfetto.dev",
    "--prometheus": "write the latest metrics for Prometheus's textfile collector",
}
FLAGS = {
    "--out FILE": "the HTML file (default: report.html in the run directory)",
    "--no-samples": "leave out prompts and answers, for sharing the page",
    "--compare P": "show the curves and settings of this second run beside those of the first",
    **{
        f"{flag} FILE": f"{what}; the HTML page is then written only with --out"
        for flag, what in FORMATS.items()
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, FLAGS)


#: what the name of a file promises, and the flag that writes it
SUFFIXES = {".csv": "--csv", ".json": "--perfetto", ".prom": "--prometheus"}


def refuse_another_format(out: str) -> None:
    """`--out` writes HTML. Raises UsageError for a file whose name promises something else."""
    suffix = Path(out).suffix.lower()
    if suffix not in ("", ".html", ".htm"):
        instead = f"; {SUFFIXES[suffix]} {out} writes that" if suffix in SUFFIXES else "; name it .html"
        raise UsageError(f"--out {out}: is the HTML page, and {suffix} is none{instead}")


def main(args: argparse.Namespace) -> int:
    from fsbarrier.view import report_formats
    from fsbarrier.view.report import page
    from fsbarrier.view.run_status import look_once

    if args.out:
        refuse_another_format(args.out)
    if args.compare and not args.out and any((args.csv, args.perfetto, args.prometheus)):
        raise UsageError("--compare: only the HTML page shows two runs; name it with --out")
    log_path = flags.find_log_path(args)
    reader, status = look_once(log_path)
    files.set_shared_group(reader.record.settings.shared_group)
    texts = {}
    if args.csv:
        texts["--csv"] = (args.csv, report_formats.csv_table(reader, status))
    if args.perfetto:
        texts["--perfetto"] = (args.perfetto, report_formats.perfetto_trace(reader))
    if args.prometheus:
        texts["--prometheus"] = (args.prometheus, report_formats.prometheus_text(reader, status))
    if args.out or not texts:
        second = look_once(preflight.absolute(args.compare)) if args.compare else None
        html = page(reader, status, with_samples=not args.no_samples, compared=second)
        texts["--out"] = (args.out or str(log_path / "report.html"), html)
    for flag, (name, text) in texts.items():
        print(flags.write_file(flag, name, text.encode()))
    return 0
