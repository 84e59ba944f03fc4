"""No path in a record leads out of the run: only the last part of what it names counts, in the folder where that belongs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_assign import context, rl

from fsbarrier.program import Command, Context, Steps, Work

OUTSIDE = ("/outside/{}", "../../outside/{}", "{}/../../../outside/{}", "outside/{}")
POLICY = "policy-000003.g0002"


def decided(phase: str, iteration: int = 3, **value: Any) -> Mapping[str, Any]:
    return {phase: {"iteration": iteration, "value": value}}


def spec_of(work: Work) -> Mapping[str, Any]:
    """What the first program of a work is told."""
    first = work.works[0] if isinstance(work, Steps) else work
    for one in work.works if isinstance(work, Steps) else (first,):
        if isinstance(one, Command):
            return one.spec
    raise AssertionError(work)


def published(path: str) -> Mapping[str, Any]:
    return decided("weights_publish", 2, folder=path, policy_version=3, digest="d")


def update(ctx: Context) -> Work:
    work: Work = rl.update(ctx)
    return work


@pytest.mark.parametrize("said", OUTSIDE)
def test_what_decisions_name_is_looked_for_in_the_run_alone(said: str) -> None:
    policy = context(decisions=published(said.format(POLICY, POLICY))).policy
    assert policy.model == Path("/run/checkpoints") / POLICY / "model"
    merged, part = said.format("merged", "merged"), said.format("part", "part")
    named = decided("train_aggregate", merged=merged, earlier=[merged])
    folder = "/run/train_trajectories"
    assert rl.learned_from(context("batch_prepare", decisions=named)) == [f"{folder}/merged"] * 2
    adopted = [{"path": part, "valid_bytes": 10, "tasks": [1]}]
    decision = {
        "wanted": [1, 2, 3],
        "shares": {"0": [2], "1": [3]},
        "adopted": adopted,
        "fixed_shares": "",
    }
    ctx = context(
        "train_aggregate",
        decisions=decided("train_assign", **decision),
        reports=lambda phase: {0: {"part": part, "tasks": [2]}, 1: {"part": part, "tasks": [3]}},
    )
    parts = spec_of(rl.aggregate_train(ctx))["parts"]
    assert [one["path"] for one in parts] == [f"{folder}/part"] * 3
    batch = said.format("batch", "batch")
    ready = {"master_addr": "127.0.0.1", "master_port": 1, "trainer": ""}
    decisions = {**decided("batch_prepare", batch=batch, port=1), **decided("update_ready", **ready)}
    spec = spec_of(update(context("update", decisions=decisions, joins={}, accelerators=0, cpus=2)))
    assert spec["batch"] == "/run/checkpoints/batches/batch"
    made = decided("update", out=said.format(POLICY, POLICY), policy_version=3)
    work = rl.publish_weights(context("weights_publish", decisions=made))
    assert work.folder == Path("/run/checkpoints") / POLICY
    assert "outside" not in json.dumps([dict(spec), list(map(str, parts))])
