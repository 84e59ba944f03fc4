"""Tests on a single node: races between threads, free space, limits."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from pathlib import Path

from fsbarrier.doctor.findings import NOTE, OK, REFUSED, Check
from fsbarrier.processes.limits import SHARED_MEMORY
from fsbarrier.store import files
from fsbarrier.store.retry import FAILING
from fsbarrier.wording import gib

RACES, RACERS = 40, 4
#: a probe ends after this time, with fewer samples on a slow filesystem
ENOUGH_S = 8.0
#: Interval between rounds, which all threads start together; a create that takes longer than the second value counts as hung.
TICK_S, HANGS_S = 0.002, 30.0
MIN_FREE_BYTES, MIN_FREE_INODES, MIN_OPEN_FILES, MIN_SHM_BYTES = 2 * 1024**3, 10_000, 1024, 1024**3
NEEDED = (
    "fsbarrier needs hard links and symbolic links, as on NFSv3 and later, Lustre, GPFS, CephFS, ext4 or xfs"
)


def exclusive_create(scratch: Path, racers: int = RACERS, rounds: int = RACES) -> Check:
    """Several threads race to create the same names; each name must have exactly one winner.

    The kernel treats threads like processes of this host. Raises the OSError of a transient filesystem failure.
    """
    name, wins, failures = "exclusive create", [list[int]() for _ in range(racers)], list[OSError]()
    begin, pause = time.monotonic() + TICK_S, threading.Event()

    def race(me: int) -> None:
        for number in range(rounds):
            if number and time.monotonic() > begin + ENOUGH_S:
                return
            pause.wait(max(0.0, begin + TICK_S * number - time.monotonic()))
            won = False
            try:
                path = scratch / f"race-{number}"
                won = files.create_exclusive(path, b"%d" % me, durable=False)
            except OSError as error:
                failures.append(error)
            wins[me].append(int(won))

    threads = [threading.Thread(target=race, args=(me,), daemon=True) for me in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begin + HANGS_S - time.monotonic()))
        if thread.is_alive():
            hung = f"creating a file did not return within {HANGS_S:g} s"
            return Check(name, REFUSED, hung, "check the file server, and dmesg for messages about the mount")
    lasting = [error for error in failures if error.errno not in FAILING]
    if lasting:
        full = lasting[0].errno in (errno.ENOSPC, errno.EDQUOT)
        return Check(name, REFUSED, str(lasting[0].strerror or lasting[0]), "make room" if full else NEEDED)
    if failures and not any(map(sum, wins)):
        raise failures[0]
    rounds = min(map(len, wins))
    return judge_races(name, [row[:rounds] for row in wins], f"{racers} threads on this host")


def symbolic_links(scratch: Path) -> Check:
    """Check that symbolic links work, because `model.pt` is one."""
    try:
        os.symlink("there", scratch / "link")
    except OSError as error:
        return Check("symbolic links", REFUSED, f"not supported: {error.strerror}", NEEDED)
    return Check("symbolic links", OK, "made one")


def judge_races(name: str, wins: list[list[int]], who: str) -> Check:
    """Judge races; `wins` has 1 or 0 per round for each racer. Two winners break the protocol; occasional rounds without one do not."""
    winners = [sum(column) for column in zip(*wins, strict=True)]
    two, none = sum(count > 1 for count in winners), sum(count == 0 for count in winners)
    if two:
        finding = f"{two} of {len(winners)} races of {who} had more than one winner"
        return Check(
            name, REFUSED, finding, "two nodes could make different decisions; use another filesystem"
        )
    if none > len(winners) // 10:
        finding = (
            f"{none} of {len(winners)} races of {who} had no winner: creates fail, or report a false failure"
        )
        return Check(name, REFUSED, finding, NEEDED)
    if none:
        return Check(name, NOTE, f"{none} of {len(winners)} races of {who} had no winner, the others had one")
    shares = ", ".join(str(sum(row)) for row in wins)
    return Check(name, OK, f"{len(winners)} races of {who}: one winner each ({shares})")


def space(path: Path) -> list[Check]:
    """Free bytes and inodes."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    room = gib(free)
    checks = [Check.enough("free space", free >= MIN_FREE_BYTES, room, "make room before a run")]
    # Filesystems with dynamic inodes report 0.
    if status.f_files:
        enough = status.f_favail >= MIN_FREE_INODES
        advice = "remove files you no longer need"
        checks.append(Check.enough("free inodes", enough, str(status.f_favail), advice))
    return checks


def this_node() -> list[Check]:
    """Resource limits of this node that matter for runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finding = f"{soft} (at most {hard})"
    checks = [Check.enough("open files", soft >= MIN_OPEN_FILES, finding, "ulimit -n 65536")]
    shm = SHARED_MEMORY
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        finding, advice = (
            gib(size),
            "NCCL and vLLM need at least 1 GiB (docker: --shm-size)",
        )
        checks.append(Check.enough("shared memory", size >= MIN_SHM_BYTES, finding, advice))
    return checks
