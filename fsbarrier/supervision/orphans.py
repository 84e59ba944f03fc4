"""What outlives a daemon in spite of all: the processes of a program whose daemon and both guards were killed at once.

Each child's tree is written down in a private folder of this machine, and the next start of any child by the same
user ends what of it is still there, if the daemon that started it is not. A process is known by its pid, start time,
boot and pid namespace. Nothing here raises: where the notes cannot be kept, the guards still do their work.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from fsbarrier import files
from fsbarrier.supervision import processes

_swept = threading.Lock()  # taken once in the life of a process


def note(name: str, tree: Mapping[int, int]) -> None:
    """Write down that `tree` (pid -> start time) is ours, in place of what was noted as `name` before."""
    with contextlib.suppress(OSError):
        if (folder := _folder()) is not None:
            me = os.getpid()
            record = {"here": _here(), "daemon": [me, processes.Stat(me).start], "tree": list(tree.items())}
            files.write_atomic(folder / _file_name(name), json.dumps(record).encode())


def forget(name: str) -> None:
    """All that was noted as `name` has ended."""
    with contextlib.suppress(OSError):
        if (folder := _folder()) is not None:
            (folder / _file_name(name)).unlink(missing_ok=True)


def sweep() -> dict[int, int]:
    """End what daemons of this user that are dead have left here; gives that as pid -> start time.

    Only the first call in a process does it.
    """
    ended: dict[int, int] = {}
    if not _swept.acquire(blocking=False):
        return ended
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.json")) if (folder := _folder()) is not None else []:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                ended |= _end(path)
    return ended


def _end(path: Path) -> dict[int, int]:
    record, here = json.loads(path.read_bytes()), _here()
    tree = {int(pid): int(start) for pid, start in record["tree"]}
    ended: dict[int, int] = {}
    if record["here"]["boot"] == here["boot"]:
        if record["here"] != here or processes.alive(dict([record["daemon"]])):
            return ended  # another container's, to which its numbers belong; or a daemon that does well
        ended = end(tree, 5.0)
        if processes.alive(tree):
            return ended
    path.unlink(missing_ok=True)
    return ended


def end(tree: Mapping[int, int], deadline_s: float, *, session: int = 0) -> dict[int, int]:
    """Kill what is left of `tree` (pid -> start time), of `session` if given, and all below; gives what was hit."""

    def find() -> dict[int, int]:
        found = {pid: stat for pid, stat in processes.scan().items() if stat.state not in "ZX"}
        ours = {pid: start for pid, start in tree.items() if pid in found and found[pid].start == start}
        if session:
            ours |= {pid: stat.start for pid, stat in found.items() if stat.session == session}
        for pid in list(ours):
            ours |= processes.below(pid, found)
        return ours

    ended: dict[int, int] = {}
    deadline = time.monotonic() + deadline_s
    while (hit := processes.freeze_and_kill(find)) and time.monotonic() < deadline:
        ended |= hit
        _until_one_is_gone(hit, deadline - time.monotonic())
    return ended


def _until_one_is_gone(tree: Mapping[int, int], timeout_s: float) -> None:
    """Wait for the end of any of `tree`, a second at most."""
    poller, pidfds = select.poll(), []
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(processes.open_pidfd(pid))
    blind = -1 in pidfds or not pidfds
    for pidfd in pidfds:
        if pidfd >= 0:
            poller.register(pidfd, select.POLLIN)
    poller.poll(min(max(timeout_s, 0.0), 0.01 if blind else 1.0) * 1000)
    for pidfd in pidfds:
        if pidfd >= 0:
            os.close(pidfd)


def _here() -> dict[str, str]:
    """What a pid and a start time are relative to."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }


def _file_name(name: str) -> str:
    return f"{os.readlink('/proc/self/ns/pid').strip('pid:[]')}-{os.getpid()}-{name}.json"


def _folder() -> Path | None:
    """The notes' folder, made if need be; None where somebody else has taken its name."""
    folder = Path(tempfile.gettempdir()) / f"fsbarrier-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if mine else None
