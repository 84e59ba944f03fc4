"""What a publication moves through the run directory and how long that takes: whole, as a delta, and as adapters, in one run.

`python scripts/lab/bench_publish.py --rates 1000,200,50` makes a model of bfloat16 weights (or takes the files of --model), changes some of
them by one unit in the last place, as an update at a small learning rate does, and publishes that in each way, with the product's own
code, through a FUSE mount of the tests that is no faster than the given rates and counts what is read and written. For other sizes,
`fsbarrier plan --model llama-8b` counts bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "fuse"))

from mounting import missing, mounted  # type: ignore[import-not-found]

from fsbarrier.engine.model import tensors_in, weight_files
from fsbarrier.rundir.hashed_file import copy_hashed, digest_of
from fsbarrier.training import merge_adapters
from fsbarrier.training.merge_adapters import AdapterFiles
from fsbarrier.training.weight_delta import Source, encode, rebuild

WIDTH = 1024


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
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fsbarrier-publish-") as folder:
        bench = Bench(Path(folder), arguments.model, arguments.mb, arguments.changed, arguments.rank)
        kinds: dict[str, Callable[[], dict[str, float]]] = {
            "whole": bench.whole,
            "delta": bench.delta,
            "adapters": bench.adapters,
        }
        print(
            f"weights: {bench.size / 1e6:.0f} MB, {arguments.changed:.1%} changed; adapters of rank {arguments.rank}"
        )
        columns = {"": 9, "MB/s": 6, "written MB": 12, "of whole": 10, "row 10 s": 10}
        columns |= {"sampler MB": 12, "sampler s": 11, "joiner MB": 11, "joiner s": 10, "CPU s": 7}
        print("".join(f"{name:>{width}}" for name, width in columns.items()))
        for rate in [float(text) for text in arguments.rates.split(",")]:
            for name, publish in kinds.items():
                bench.rate = rate
                done = publish()
                written, read, joins = (
                    done[f"{step}"] / 1e6 for step in ("row_10_written", "sampler_read", "joiner_read")
                )
                print(
                    f"{name:9}{rate:6.0f}{written:12.2f}{written * 1e6 / bench.size:10.4f}{done['row_10']:10.2f}"
                    f"{read:12.2f}{done['sampler']:11.2f}{joins:11.2f}{done['joiner']:10.2f}{done['cpu']:7.2f}",
                    flush=True,
                )
    return 0


class Bench:
    """The weights before and after an update, and their adapters, on a node; `shared` is the run directory, seen through the mount."""

    def __init__(self, folder: Path, model: Path | None, mb: int, changed: float, rank: int) -> None:
        self.folder, self.node, self.shared = folder, folder / "node", folder / "shared"
        # Megabytes a second of the mount.
        self.rate = 0.0
        for made in (self.node, self.shared, self.node / "model", self.node / "adapter"):
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
        shutil.copytree(self.node / "model", self.shared / "model")
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

    def whole(self) -> dict[str, float]:
        """Every node that samples reads it whole."""
        return self.moved(
            lambda mount: copy_hashed(self.after, mount / "whole"),
            sampler=lambda mount, into: copy_hashed(mount / "whole", into),
            joiner=lambda mount, into: copy_hashed(mount / "whole", into),
        )

    def delta(self) -> dict[str, float]:
        """A node that samples has the version before; one that joins reads that, too, as an anchor."""

        def from_anchor(anchor: Path, mount: Path, into: Path) -> None:
            assert rebuild(Source(anchor, apply=mount / "delta"), into, lambda: None)[0] == digest_of(
                self.after
            )

        return self.moved(
            lambda mount: encode(Source(self.before), self.after, mount / "delta", self.size),
            sampler=lambda mount, into: from_anchor(self.before, mount, into),
            joiner=lambda mount, into: from_anchor(mount / "model" / "model.safetensors", mount, into),
        )

    def adapters(self) -> dict[str, float]:
        """A node that samples has the first model in its page cache; one that joins reads it."""

        def merged(model: Path, mount: Path, into: Path) -> None:
            into.mkdir()
            merge_adapters.merge(model, AdapterFiles.read(mount / "adapter", {}), "bfloat16", into)

        def publish(mount: Path) -> None:
            (mount / "adapter").mkdir()
            for path in (self.node / "adapter").iterdir():
                copy_hashed(path, mount / "adapter" / path.name)

        return self.moved(
            publish,
            sampler=lambda mount, into: merged(self.node / "model", mount, into),
            joiner=lambda mount, into: merged(mount / "model", mount, into),
        )

    def moved(
        self,
        publish: Callable[[Path], object],
        *,
        sampler: Callable[[Path, Path], object],
        joiner: Callable[[Path, Path], object],
    ) -> dict[str, float]:
        """The seconds of each step, and the bytes that were written in the first one, each through a mount of its own."""
        steps: dict[str, Callable[[Path], object]] = {
            "row_10": publish,
            "sampler": lambda mount: sampler(mount, self.node / "made"),
            "joiner": lambda mount: joiner(mount, self.node / "made"),
        }
        done, begun = dict[str, float](), time.process_time()
        for name, step in steps.items():
            counted, mount = self.folder / "moved", self.folder / "mount"
            with mounted(self.shared, mount, ("--mb-per-s", str(self.rate), "--count", str(counted))):
                started = time.monotonic()
                step(mount)
                done[name] = time.monotonic() - started
            done[f"{name}_read"], done[f"{name}_written"] = map(int, counted.read_text().split())
            made = self.node / "made"
            shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
        for made in self.shared.iterdir():
            if made.name != "model":
                shutil.rmtree(made) if made.is_dir() else made.unlink()
        return {**done, "cpu": time.process_time() - begun}


def write(path: Path, shapes: dict[str, list[int]], kind: str, data: bytes) -> None:
    """Write a safetensors file with these tensors, whose bytes follow each other in `data`."""
    end, ordered = 0, []
    for name, shape in shapes.items():
        begin, end = end, end + shape[0] * shape[1] * merge_adapters.SIZES[kind]
        ordered.append((name, {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}))
    path.write_bytes(merge_adapters.header(ordered, dict.fromkeys(shapes, kind)) + data[:end])


if __name__ == "__main__":
    sys.exit(main())
