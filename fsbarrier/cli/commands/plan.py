"""Estimate a run's engines, shards, micro-batches, memory use and checkpoint size. Exits with code 2 if the run does not fit, and
shows the numbers and the nearest configuration that fits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.cli.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.processes.limits import memory_bytes
from fsbarrier.settings.sources import ChosenValue

if TYPE_CHECKING:
    from fsbarrier.planning.cluster_plan import Cluster

GB = 10**9

EXAMPLE = "fsbarrier plan --model qwen-72b --nodes 32 --accelerators 8 --accelerator-memory-gb 80 engine.tensor_parallel_size=4"


FLAGS = {
    "--nodes N": "number of nodes (default: num_nodes)",
    "--accelerators N": "accelerators per node; 0: train on CPUs (default: as on this machine)",
    "--accelerator-memory-gb G": "memory of each accelerator (default: as on this machine)",
    "--config FILE.toml": flags.CONFIG,
    "--json": "print all numbers as JSON, sizes in bytes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "a model folder, of which config.json is enough, or a size: qwen-7b, qwen3-4b, llama-8b … (planning.md lists them)"
    parser.add_argument("--model", metavar="M", required=True, help=model)
    flags.add(parser, FLAGS)
    flags.add_settings(parser, "trainer.shard=all")


def main(args: argparse.Namespace) -> int:
    from fsbarrier.cli.start import preflight
    from fsbarrier.cli.start.model_folder import check_trainable, find_model
    from fsbarrier.planning import cluster_plan
    from fsbarrier.planning.model_shape import ModelShape
    from fsbarrier.settings.resolve import resolve
    from fsbarrier.settings.sections import LoraSettings, known_names
    from fsbarrier.settings.sources import from_file, from_words

    known = known_names()
    chosen = [
        *(from_file(Path(args.config)) if args.config else ()),
        *from_words(args.settings, known),
    ]
    if args.nodes is not None:
        chosen.append(ChosenValue("num_nodes", args.nodes, "--nodes"))
    settings = resolve(chosen)
    cluster = planned(settings.num_nodes, args.accelerators, args.accelerator_memory_gb)

    def shape_of(model: str, setting: str) -> ModelShape:
        folder, lora = preflight.absolute(model), settings.lora if setting == "--model" else LoraSettings()
        shape = None if folder.is_dir() else ModelShape.of_name(model, lora)
        if shape is not None:
            return shape
        if not folder.is_dir():
            folder = find_model(model, None, os.environ, setting)
        if setting == "--model":
            check_trainable(folder, settings)
        return ModelShape.of_folder(folder, lora)

    frozen = {
        name: shape_of(str(engine.model), f"engines.{name}.model")
        for name, engine in settings.engines.items()
    }
    plan = cluster_plan.make_plan(shape_of(args.model, "--model"), settings, cluster, frozen)
    if args.json:
        print(json.dumps(cluster_plan.as_json(plan)))
    else:
        print("\n".join(cluster_plan.lines(plan)))
    sys.stdout.flush()
    if plan.problems:
        raise UsageError("; ".join(plan.problems))
    return 0


def planned(num_nodes: int, accelerators: int | None, memory_gb: float | None) -> Cluster:
    """`num_nodes` nodes with the given resources, or those of this machine. Raises UsageError."""
    from fsbarrier.engine import accelerators as devices
    from fsbarrier.planning.cluster_plan import Cluster

    if memory_gb is not None and not 0 < memory_gb < 1e9:
        raise UsageError(f"--accelerator-memory-gb {memory_gb:g}: must be greater than 0, in GB")
    here = devices.detect()
    count = len(here) if accelerators is None else accelerators
    if memory_gb is not None:
        memory = int(memory_gb * GB)
    elif not count:
        memory, _ = memory_bytes()
    else:
        memory = min((device.memory_total_bytes for device in here), default=0)
    if memory <= 0:
        raise UsageError(
            "--accelerator-memory-gb is missing: this machine has no accelerator that reports its memory"
        )
    return Cluster(num_nodes, count, memory)
