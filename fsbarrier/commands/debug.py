"""`fsbarrier debug`: what every node of a run does at this moment, in one archive."""

from __future__ import annotations

import argparse

from fsbarrier import reading
from fsbarrier.commands import flags
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.printable import printable
from fsbarrier.rundir import debug_requests
from fsbarrier.start import preflight

SUMMARY = "Collect the stacks of all nodes' processes, their memory, open files, accelerators and logs in one archive. No run is changed."
EXAMPLE = "fsbarrier debug --log-path runs/default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="where to write (default: debug-NUMBER.tar.gz in the run directory)"
    )


def main(args: argparse.Namespace) -> int:
    record = flags.find_run(args)
    paths = record.paths
    try:
        key = debug_requests.request(paths)
        out = preflight.absolute(args.out) if args.out else paths.debug_archive(key)
        if out.is_dir():
            raise UsageError(f"--out {args.out}: it is a folder")
        reading.check_may_replace(out)
        flags.say(f"asked the nodes of run {printable(record.run_id)}; waiting for those that live")
        silent = debug_requests.collect(paths, key, record.settings.coordination.suspect_s, out)
    except reading.NotPlain as error:
        raise UsageError(f"{error.filename}: {error.strerror}; name another file with --out") from None
    except PermissionError as error:
        raise UsageError(f"{error.filename}: you may not write there ({error.strerror})") from None
    except OSError as error:
        raise StoreError(f"the archive cannot be written: {error}") from None
    for beat in silent:
        print(f"node {beat.rank} on {printable(beat.host)} (pid {beat.pid}) does not answer")
    print(f"wrote {out}; it holds logs, so look at it before you send it to others")
    return 0
