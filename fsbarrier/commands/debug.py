"""`fsbarrier debug`: collects the current state of every node of a run in one archive."""

from __future__ import annotations

import argparse

from fsbarrier import reading
from fsbarrier.commands import flags
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.printable import printable
from fsbarrier.rundir import debug_requests
from fsbarrier.start import preflight

SUMMARY = "Collect stacks, memory, open files, accelerator state and logs of all nodes in one archive. Does not disturb the run."
EXAMPLE = "fsbarrier debug --log-path runs/default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="output file (default: debug-NUMBER.tar.gz in the run directory)"
    )


def main(args: argparse.Namespace) -> int:
    record = flags.find_run(args)
    paths = record.paths
    out = preflight.absolute(args.out) if args.out else None
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {args.out}: {out.parent} is not an existing directory")
    try:
        key = debug_requests.request(paths)
        out = out or paths.debug_archive(key)
        if out.is_dir():
            raise UsageError(f"--out {args.out}: is a directory; name a file")
        reading.check_may_replace(out)
        flags.say(f"asked the nodes of run {printable(record.run_id)}; waiting for their answers")
        silent = debug_requests.collect(paths, key, record.settings.coordination.suspect_s, out)
    except reading.NotPlain as error:
        raise UsageError(f"{error.filename}: {error.strerror}; name another file with --out") from None
    except PermissionError as error:
        raise UsageError(f"{error.filename}: no permission to write there ({error.strerror})") from None
    except OSError as error:
        raise StoreError(f"cannot write the archive: {error}") from None
    for beat in silent:
        print(f"node {beat.rank} on {printable(beat.host)} (pid {beat.pid}) did not answer")
    print(f"wrote {out}; it contains logs, so review it before you share it")
    return 0
