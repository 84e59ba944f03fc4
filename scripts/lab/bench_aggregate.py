"""How long the merge of an iteration takes, beside one torch.save of the same trajectories, and how much memory.

`python scripts/lab/bench_aggregate.py --mb 400` makes the files of three ranks, then times both by turns, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsbarrier.trajectories import RankFileWriter

RANKS = 3
#: Prints what the code took: seconds, seconds of processor time, and the most memory in megabytes.
TIMED = """
import json, resource, sys, time
from pathlib import Path
import torch
from fsbarrier.aggregate import Part, aggregate, load
paths, out = [Path(path) for path in sys.argv[2:]], Path(sys.argv[1])
if {save}:
    from fsbarrier.data.merged_file import as_tensors
    found = [one for path in paths for one in as_tensors(load(path)["trajectories"])]
begun, worked = time.perf_counter(), time.process_time()
if {save}:
    torch.save({{"trajectories": found, "metadata": {{}}}}, out)
else:
    aggregate([Part(path) for path in paths], out, metadata={{}}, expected=None)
took = time.perf_counter() - begun, time.process_time() - worked
print(json.dumps([*took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=float, default=400, help="size of all files together, in megabytes")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens a trajectory")
    parser.add_argument("--samples", type=int, default=16, help="trajectories a group")
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured")
    parser.add_argument("--dir", type=Path, help="the filesystem to measure (default: the temporary one)")
    args = parser.parse_args()
    if args.dir is not None and not args.dir.is_dir():
        parser.error(f"--dir {args.dir}: no such folder")
    with tempfile.TemporaryDirectory(prefix="bench-aggregate-", dir=args.dir) as folder:
        paths = make_files(Path(folder), args)
        print(f"{RANKS} files, {sum(path.stat().st_size for path in paths) / 1e6:.0f} MB")
        times: dict[str, list[list[float]]] = {"torch.save": [], "merge": []}
        for _ in range(args.rounds):
            for name, taken in times.items():
                code = TIMED.format(save=name == "torch.save")
                words = [sys.executable, "-c", code, f"{folder}/merged", *map(str, paths)]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                taken.append(json.loads(done.stdout))
        middle = {
            name: [statistics.median(one) for one in zip(*of, strict=True)] for name, of in times.items()
        }
        for name, (wall, worked, memory) in middle.items():
            print(f"{name:10} {wall:6.2f} s, {worked:6.2f} s of processor time, at most {memory:5.0f} MB")
        print(f"merge: {middle['merge'][0] / middle['torch.save'][0]:.2f} x torch.save")
    return 0


def make_files(folder: Path, args: argparse.Namespace) -> list[Path]:
    """Ranks' files whose arrays and text are about as large beside each other as real ones: four bytes of text a token."""
    count, rng = args.tokens, random.Random(0)
    groups = max(1, round(args.mb * 1e6 / RANKS / (args.samples * count * 13)))
    paths = [folder / f"rank_{rank}" for rank in range(RANKS)]
    for rank, path in enumerate(paths):
        with mock.patch("os.fsync", lambda fd: None), RankFileWriter(path, header={}) as writer:
            for task in range(rank, groups * RANKS, RANKS):
                group = [
                    {
                        "task_id": f"task-{task}",
                        "task_index": task,
                        "sample": sample,
                        "reward": rng.random(),
                        "policy_version": 1,
                        "node_rank": rank,
                        "messages": [{"role": "user", "content": "?"}],
                        "text": rng.randbytes(count * 2).hex(),
                        "token_ids": array("i", rng.randbytes(count * 4)),
                        "loss_mask": array("B", [1]) * count,
                        "logprobs": array("f", rng.randbytes(count * 4)),
                    }
                    for sample in range(args.samples)
                ]
                writer.append_group(task, group)
    return paths


if __name__ == "__main__":
    sys.exit(main())
