"""Write the stacks of this host's programs into their logs, and collect the logs of all nodes in one archive."""

from __future__ import annotations

import argparse
import io
import os
import tarfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.network.this_host import host_name
from fsbarrier.processes import processes
from fsbarrier.processes.signals import write_stacks
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.heartbeats import read_beats
from fsbarrier.rundir.logs import log_folders
from fsbarrier.rundir.names import JOURNAL, START
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files, reading
from fsbarrier.wording import printable, without_passwords

EXAMPLE = "fsbarrier debug --log-path runs/default"
# The size of the end of each log and journal in the archive.
TAIL_BYTES = 256 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, {"--out FILE": "output file (default: debug-TIME.tar.gz in the run directory)"})


def main(args: argparse.Namespace) -> int:
    paths = flags.find_run(args).paths
    name = args.out or paths.root / f"debug-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.tar.gz"
    stack_lines = list(_ask_for_stacks(paths))
    print("".join(f"{line}\n" for line in stack_lines), end="")
    # Only this user may read it, whoever may read the run.
    files.set_shared_group(False)
    out = flags.write_file("--out", name, _archive(paths, Path(name).name.partition(".")[0], stack_lines))
    print(f"wrote {out}; it contains logs, so review it before you share it")
    return 0


def _ask_for_stacks(paths: RunPaths) -> Iterator[str]:
    """Make the daemons on this host and their programs write their stacks into their logs; a line about each node. Raises OSError."""
    for beat in read_beats(paths.root).values():
        node = f"node {beat.rank} on {printable(beat.host)} (pid {beat.pid})"
        if beat.state in GONE:
            continue
        if beat.host != host_name():
            yield f"{node}: run this command there too for the stacks of its programs"
            continue
        try:
            tree = {beat.pid: processes.Stat(beat.pid).start, **processes.below(beat.pid)}
        except OSError:
            yield f"{node}: has no process here"
            continue
        accepted = write_stacks(tree)
        yield f"{node}: {sum(accepted.values())} processes wrote their stacks into their logs"
        for pid in (pid for pid, wrote in accepted.items() if not wrote):
            yield f"{node}: process {pid} did not: it is stopped, or hangs in the kernel"


def _archive(paths: RunPaths, folder: str, stack_lines: list[str]) -> bytes:
    """`stack_lines`, the ends of the logs and journals, and the last heartbeats, below `folder`.

    Only plain files with one name are included, no link is followed, and passwords in addresses are removed. Raises OSError.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        _add(archive, f"{folder}/nodes.txt", "".join(f"{line}\n" for line in stack_lines))
        for path in _files_for_archive(paths):
            _add(archive, f"{folder}/{path.relative_to(paths.root)}", _end_of(paths, path))
    return stream.getvalue()


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = without_passwords(text).encode(errors="replace")
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(data))


def _files_for_archive(paths: RunPaths) -> Iterator[Path]:
    """The logs, journal and heartbeat of each node's newest start."""
    names = PosixStore().names
    for logs in log_folders(paths).values():
        yield from (logs / name for name in sorted(names(logs)) if name.endswith(".log"))
    for folder, kind in ((paths.events, JOURNAL), (paths.beats, START)):
        starts = {start.rank: start for start in sorted(kind.parse_all(names(folder)))}
        yield from (folder / kind.build(start.rank, start.incarnation) for start in starts.values())


def _end_of(paths: RunPaths, path: Path) -> str:
    """The end of a file, or why it cannot be read."""
    try:
        with os.fdopen(reading.open_below(paths.root, path), "rb") as stream:
            if os.fstat(stream.fileno()).st_nlink > 1:
                return "(not collected: it has a second name, a hard link, and may be a file from outside the run)\n"
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            return stream.read(TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return f"(not collected: {error.strerror})\n"
