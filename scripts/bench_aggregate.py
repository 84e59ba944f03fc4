"""How fast trajectory files are merged, beside `cp` of the same files.

`python scripts/bench_aggregate.py --gb 1` makes three parts of random tokens, then times by turns copying and merging them.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsbarrier.aggregate import Part, aggregate
from fsbarrier.trajectories import ShardWriter, scan_shard

PARTS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of all parts together")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens a trajectory")
    parser.add_argument("--samples", type=int, default=16, help="trajectories a group")
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured")
    parser.add_argument(
        "--finished", action="store_true", help="merge finished rank files instead of growing ones"
    )
    parser.add_argument(
        "--dir", type=Path, default=None, help="the filesystem to measure (default: the temporary one)"
    )
    args = parser.parse_args()
    if args.dir is not None and not args.dir.is_dir():
        parser.error(f"--dir {args.dir}: no such folder")
    with tempfile.TemporaryDirectory(prefix="bench-aggregate-", dir=args.dir) as folder:
        measure(Path(folder), args)
    return 0


def measure(folder: Path, args: argparse.Namespace) -> None:
    paths = make_parts(folder, args)
    scans = [scan_shard(path, verify=False) for path in paths]
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    groups = sum(len(scan.groups) for scan in scans)
    print(
        f"{PARTS} parts, {megabytes:.0f} MB, {groups} groups of {args.samples} trajectories of {args.tokens} tokens"
    )
    merged, copies = folder / "merged.pt", folder / "copies"
    flush_nothing = mock.patch("os.fsync", lambda fd: None)

    def copy() -> None:
        copies.mkdir()
        subprocess.run(["cp", *map(str, paths), str(copies)], check=True)

    def copy_flushed() -> None:
        copy()
        for path in copies.iterdir():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())

    def merge() -> None:
        aggregate([Part(path) for path in paths], merged, metadata={}, expected=None)

    def merge_unflushed() -> None:
        with flush_nothing:
            merge()

    works = {"cp": copy, "merge": merge_unflushed, "cp, flushed": copy_flushed, "merge, flushed": merge}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(args.rounds):
        for name, work in works.items():
            times[name].append(timed(work))
            shutil.rmtree(copies, ignore_errors=True)
            merged.unlink(missing_ok=True)
            # What one measurement leaves to be written must not slow the next.
            os.sync()
    for name, taken in times.items():
        middle = statistics.median(taken)
        print(f"{name:15} {middle:7.3f} s  {megabytes / middle:7.0f} MB/s  (fastest {min(taken):.3f} s)")
    for kind in ("", ", flushed"):
        ratio = statistics.median(times["cp" + kind]) / statistics.median(times["merge" + kind])
        print(f"merge{kind}: {ratio:.2f} x the speed of cp{kind}")


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def make_parts(folder: Path, args: argparse.Namespace) -> list[Path]:
    """Parts whose arrays and text are about as large beside each other as real ones: four bytes of text a token."""
    count = args.tokens
    rng = random.Random(0)
    mask = array("B", [1]) * count
    paths = [folder / f"rank_{rank}.part" for rank in range(PARTS)]
    group_bytes = args.samples * count * 13
    for rank, path in enumerate(paths):
        with (
            mock.patch("os.fsync", lambda fd: None),
            ShardWriter(path, prefix=f"n{rank:04d}", header={}) as writer,
        ):
            for number in range(max(1, round(args.gb * 1e9 / PARTS / group_bytes))):
                task = number * PARTS + rank
                group = []
                for sample in range(args.samples):
                    text = rng.randbytes(count * 2).hex()
                    group.append(
                        {
                            "task_id": f"task-{task}",
                            "task_index": task,
                            "sample": sample,
                            "reward": rng.random(),
                            "policy_version": 1,
                            "node_rank": rank,
                            "messages": [
                                {"role": "user", "content": "?"},
                                {"role": "assistant", "content": text},
                            ],
                            "text": text,
                            "token_ids": array("i", rng.randbytes(count * 4)),
                            "loss_mask": mask,
                            "logprobs": array("f", rng.randbytes(count * 4)),
                        }
                    )
                writer.append_group(task, group)
            if args.finished:
                writer.finish({})
    os.sync()
    return paths


if __name__ == "__main__":
    sys.exit(main())
