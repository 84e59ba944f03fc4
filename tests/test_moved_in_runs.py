"""Runs whose versions are deltas or adapters: nodes are killed while these are made, published and applied; engines serve adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from complete_runs import Bench

from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.training.materialise import materialise

pytestmark = pytest.mark.torch

MOMENTS = ("making", "publishing", "applying")
#: A program whose node is killed once, at a moment of version 2.
DIES = """
import os, signal
from dataclasses import replace
from pathlib import Path
from fsbarrier.loader import load_module
from fsbarrier.training import checkpoint_write, weights_copy

rl = load_module("rl")
MOMENT, MARK, DAEMON = {moment!r}, Path({mark!r}), os.getpid()
make, write = weights_copy.materialise, checkpoint_write._write


def die(before=lambda: None):
    try:
        MARK.touch(exist_ok=False)
    except FileExistsError:
        return
    before()
    os.kill(DAEMON, signal.SIGKILL)
    signal.pause()


# The programs of these runs are forks of their daemon, with all that is changed here.
def write_and_die(out, version, rank, world):
    written = write(out, version, rank, world)
    if MOMENT == "making" and rank == 1 and out.name.startswith("policy-000002"):
        die()
    return written


def publish(node):
    if MOMENT == "publishing" and node.context.iteration == 2:
        die()
    return rl.publish_weights(node)


def apply(version, into, *more):
    make(version, into, *more)
    file = next(into.glob("*.safetensors"))
    if MOMENT == "applying" and version.name.startswith("policy-000002"):
        die(lambda: file.write_bytes(file.read_bytes()[:-10]))


checkpoint_write._write, weights_copy.materialise = write_and_die, apply
rows = [replace(row, leader=publish) if row.name == "weights_publish" else row for row in rl.PROGRAM.rows]
PROGRAM = replace(rl.PROGRAM, name="mine", rows=tuple(rows))
"""
#: By what is moved and when a node dies: what the versions of two sessions consist of, and settings.
DEATHS = {
    # Each generation's first version is whole, and a session's last.
    ("deltas", "making"): "whole whole delta delta whole whole delta whole",
    ("deltas", "publishing"): "whole delta whole delta whole whole delta whole",
    ("deltas", "applying"): "whole delta whole delta whole whole delta whole",
    **{("adapters", moment): "adapters " * 4 + "whole adapters adapters whole" for moment in MOMENTS},
}
SETTINGS = {
    "deltas": ("trainer.dtype=bfloat16", "placement.update=all"),
    "adapters": ("lora.rank=2", "placement.update=all"),
}
EVERY_DAY = ("deltas", "applying"), ("adapters", "publishing")


def checked(log_path: Path, copies: Path) -> list[str]:
    """What each version of a run consists of; all of it is what its manifest says, and can be made whole."""
    record, kinds = runrecord.load(log_path), []
    for number, version in checkpoints.versions(log_path):
        if not (version / checkpoints.MANIFEST).exists():
            continue
        manifest = checkpoints.verify(version)
        materialise(version, copies / version.name, Path(str(record.model)))
        kinds.append(
            "whole" if manifest.whole else "delta" if manifest.base and manifest.base.folder else "adapters"
        )
        assert manifest.policy_version == number
    return kinds


@pytest.mark.parametrize(
    ("kind", "moment"),
    [pytest.param(*case, marks=[] if case in EVERY_DAY else [pytest.mark.slow]) for case in DEATHS],
)
def test_a_node_is_killed_while_what_changed_is_moved(
    bench: Bench, tmp_path: Path, kind: str, moment: str
) -> None:
    mark, program = tmp_path / "mark", tmp_path / "mine.py"
    program.write_text(DIES.format(moment=moment, mark=str(mark)))
    how = [
        *SETTINGS[kind],
        "--program",
        str(program),
        "--eval-interval",
        "0",
        "min_nodes=1",
        "rollout.tasks=4",
    ]
    how += ["checkpoint.keep=9", f"checkpoint.weights_dir={tmp_path / 'copies'}"]
    if (kind, moment) == ("deltas", "applying"):
        # Only a node that does not train has no copy that the trainer has left.
        how.append("placement.update=node:0")
    ended = bench.run(tmp_path / "run", "--iterations", "5", *how, nodes=2)
    assert mark.exists() and [code < 0 for code in sorted(ended.codes)] == [True, False], ended.described()
    again = bench.run(tmp_path / "run", "--iterations", "8", *how, nodes=2).check()
    assert checked(tmp_path / "run", tmp_path / "whole") == DEATHS[kind, moment].split()
    # Whatever was published has been trained on what it answered.
    assert {one["policy_version"] for one in again.events("weights_published")} == {*range(1, 9)}
    assert not list((tmp_path / "copies").glob("*/*.unchecked"))


def test_engines_serve_each_version_s_adapters_beside_the_first_model(bench: Bench, tmp_path: Path) -> None:
    """Every request names its version, and the version before the last is unloaded. Another session loads what the last one made."""
    log = bench.folder / "fake" / "requests.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    copies = tmp_path / "copies"
    how = ["lora.rank=3", "lora.serve=adapter", "--eval-interval", "2", "checkpoint.keep=9"]
    how.append(f"checkpoint.weights_dir={copies}")
    for last in (3, 4):
        ended = bench.run(tmp_path / "run", "--iterations", str(last), *how).check()
    asked: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    versions = [version.name for _, version in checkpoints.versions(tmp_path / "run")]
    told = [(one["path"].rpartition("/")[2], one["lora_name"]) for one in asked if "lora_name" in one]
    one, two, three, four = versions
    load, unload = "load_lora_adapter", "unload_lora_adapter"
    first_session = [(load, one), (load, two), (load, three), (unload, one)]
    assert told == [*first_session, (load, three), (load, four)]
    sampled = [one["model"] for one in asked if one["path"].endswith(("/completions", "/generate"))]
    assert list(dict.fromkeys(sampled)) == ["policy", *versions]
    assert not [one for one in asked if one["path"] == "/collective_rpc" or "prompt_logprobs" in one]
    kinds = checked(tmp_path / "run", tmp_path / "whole")
    assert kinds == ["adapters", "adapters", "whole", "whole"]
    ready = [(event["engine_action"], event.get("weights_from")) for event in ended.events("engine_ready")]
    assert ready[:4] == [("started", None), *[("reloaded", "run directory")] * 3]
