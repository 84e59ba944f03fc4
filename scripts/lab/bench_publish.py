"""What a publication moves through the run directory and how long that takes: whole, as a delta, and as adapters, in one run.

`python scripts/lab/bench_publish.py --rates 1000,200,50` makes a model of bfloat16 weights (or takes the files of --model), changes some of
them by one unit in the last place, as an update at a small learning rate does, and publishes that in each way, with the product's own
code. The mount is a folder to and from which files are copied at most at the given rate. For other sizes, `fsbarrier plan --model llama-8b`
counts bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsbarrier.engine.model import tensors_in, weight_files
from fsbarrier.training import merge_adapters
from fsbarrier.training.merge_adapters import AdapterFiles
from fsbarrier.training.weight_delta import Source, encode, rebuild

WIDTH, PIECE = 1024, 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--mb",
        type=int,
        default=270,
        help="size of the weights, in megabytes (default: 135 million parameters)",
    )
    parser.add_argument("--model", type=Path, help="a folder with bfloat16 weights to use instead")
    parser.add_argument(
        "--changed", type=float, default=0.014, help="share of the weights that an update changes"
    )
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapters")
    parser.add_argument("--rates", default="1000,200,50", help="megabytes a second of the mount")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fsbarrier-publish-") as folder:
        bench = Bench(Path(folder), arguments.model, arguments.mb, arguments.changed, arguments.rank)
        kinds = {"whole": bench.whole, "delta": bench.delta, "adapters": bench.adapters}
        print(
            f"weights: {bench.size / 1e6:.0f} MB, {arguments.changed:.1%} changed; adapters of rank {arguments.rank}"
        )
        print(
            f"{'':9}{'MB/s':>6}{'written MB':>12}{'of whole':>10}{'row 10 s':>10}{'sampler s':>11}{'joiner s':>10}{'CPU s':>8}"
        )
        for rate in [float(text) for text in arguments.rates.split(",")]:
            for name, publish in kinds.items():
                done = publish(rate * 1e6)
                share = done["written"] / bench.size
                print(
                    f"{name:9}{rate:6.0f}{done['written'] / 1e6:12.2f}{share:10.4f}{done['row_10']:10.2f}"
                    f"{done['sampler']:11.2f}{done['joiner']:10.2f}{done['cpu']:8.2f}",
                    flush=True,
                )
    return 0


class Bench:
    """The weights before and after an update, and their adapters, on a node; `mount` is the run directory."""

    def __init__(self, folder: Path, model: Path | None, mb: int, changed: float, rank: int) -> None:
        self.node, self.mount = folder / "node", folder / "mount"
        for made in (self.node, self.mount, self.node / "model", self.node / "adapter"):
            made.mkdir()
        random = np.random.default_rng(0)
        target = self.node / "model" / "model.safetensors"
        if model is not None:
            shutil.copyfile(weight_files(model)[0], target)
        else:
            shapes = {
                f"layers.{n}.proj.weight": [WIDTH, WIDTH] for n in range(max(1, mb * 10**6 // (2 * WIDTH**2)))
            }
            numbers = (random.standard_normal((len(shapes), WIDTH * WIDTH), "f4") * 0.02).reshape(-1)
            write(target, shapes, "BF16", merge_adapters.bytes_of(numbers, "BF16"))
        self.before, self.after = target, self.node / "after.safetensors"
        begin, self.entries = tensors_in(target)
        data = np.fromfile(target, "<u2")
        first = begin // 2
        at = first + random.choice(len(data) - first, int(changed * (len(data) - first)), replace=False)
        data[at] ^= 1
        data.tofile(self.after)
        self.size = target.stat().st_size
        matrices = {name: entry["shape"] for name, entry in self.entries.items() if len(entry["shape"]) == 2}
        self.write_adapters(matrices, rank, random)

    def write_adapters(self, matrices: dict[str, list[int]], rank: int, random: np.random.Generator) -> None:
        shapes: dict[str, list[int]] = {}
        for name, (rows, columns) in matrices.items():
            module = merge_adapters.PREFIX + name.removesuffix(".weight")
            shapes |= {f"{module}.lora_A.weight": [rank, columns], f"{module}.lora_B.weight": [rows, rank]}
        amount = sum(rows * columns for rows, columns in shapes.values())
        write(
            self.node / "adapter" / merge_adapters.WEIGHTS,
            shapes,
            "F32",
            random.standard_normal(amount, "f4").tobytes(),
        )
        (self.node / "adapter" / merge_adapters.CONFIG).write_text(json.dumps({"lora_alpha": 32, "r": rank}))

    def whole(self, rate: float) -> dict[str, float]:
        with measured() as took:
            throttled(self.after, self.mount / "whole", rate)
        done = {"row_10": took(), "written": float(self.size)}
        with measured() as took:
            throttled(self.mount / "whole", self.node / "copy", rate)
        return {**done, "sampler": took(), "joiner": took(), "cpu": 0.0}

    def delta(self, rate: float) -> dict[str, float]:
        made, out, begun = self.node / "delta", self.node / "made", time.process_time()
        made.unlink(missing_ok=True)
        with measured() as took:
            written = encode(Source(self.before), self.after, made, self.size)
            throttled(made, self.mount / "delta", rate)
        assert written is not None
        done = {"row_10": took(), "written": float(written.delta.size)}
        for who in ("sampler", "joiner"):
            out.unlink(missing_ok=True)
            with measured() as took:
                anchor = self.before
                if who == "joiner":
                    anchor = throttled(self.before, self.node / "anchor", rate)
                throttled(self.mount / "delta", self.node / "read", rate)
                rebuilt, _ = rebuild(Source(anchor, apply=self.node / "read"), out, lambda: None)
            done[who] = took()
            assert rebuilt == written.made
        return {**done, "cpu": time.process_time() - begun}

    def adapters(self, rate: float) -> dict[str, float]:
        """The first model is in each node's page cache, except a joiner's."""
        begun, source = time.process_time(), self.node / "adapter" / merge_adapters.WEIGHTS
        with measured() as took:
            throttled(source, self.mount / "adapters", rate)
        done = {"row_10": took(), "written": float(source.stat().st_size)}
        for who in ("sampler", "joiner"):
            into = self.node / f"merged-{who}-{rate}"
            into.mkdir()
            with measured() as took:
                throttled(self.mount / "adapters", self.node / "read", rate)
                if who == "joiner":
                    throttled(self.before, self.node / "base", rate)
                merge_adapters.merge(
                    self.before.parent, AdapterFiles.read(self.node / "adapter", {}), "bfloat16", into
                )
            done[who] = took()
            shutil.rmtree(into)
        return {**done, "cpu": time.process_time() - begun}


def write(path: Path, shapes: dict[str, list[int]], kind: str, data: bytes) -> None:
    """Write a safetensors file with these tensors, whose bytes follow each other in `data`."""
    end, ordered = 0, []
    for name, shape in shapes.items():
        begin, end = end, end + shape[0] * shape[1] * merge_adapters.SIZES[kind]
        ordered.append((name, {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}))
    path.write_bytes(merge_adapters.header(ordered, dict.fromkeys(shapes, kind)) + data[:end])


def throttled(source: Path, target: Path, rate: float) -> Path:
    """Copy a file at most at `rate` bytes a second, as through a slow mount."""
    begun, copied = time.monotonic(), 0
    with source.open("rb") as stream, target.open("wb") as out:
        while data := stream.read(PIECE):
            out.write(data)
            copied += len(data)
            time.sleep(max(0.0, begun + copied / rate - time.monotonic()))
    return target


@contextmanager
def measured() -> Iterator[Callable[[], float]]:
    """Gives a function that says how many seconds the block took."""
    begun, ended = time.monotonic(), list[float]()
    yield lambda: ended[0] - begun
    ended.append(time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
