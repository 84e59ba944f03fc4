"""Records name files without their folders, and no name leads out of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from test_assign import context, rl

from fsbarrier.errors import ProgramFailed
from fsbarrier.program import Command, Context, Steps, Work

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


def readers(said: str) -> dict[str, Callable[[], object]]:
    """What reads a name in each of the records; `said`: a pattern for the names."""
    named = said.format
    decision = {"wanted": [1, 2], "shares": {"0": [2], "1": []}, "fixed_shares": ""}
    adopted = [{"name": named("part"), "valid_bytes": 10, "tasks": [1]}]
    ready = {"master_addr": "127.0.0.1", "master_port": 1, "trainer": ""}
    merged = decided("train_aggregate", merged=named("merged"), earlier=[named("merged")])
    made = decided("update", folder=named(POLICY), policy_version=3)
    batch = {**decided("batch_prepare", batch=named("batch"), port=1), **decided("update_ready", **ready)}

    def parts(adopted: list[dict[str, Any]], report: dict[str, Any]) -> list[str]:
        assigned = decided("train_assign", **decision, adopted=adopted)
        ctx = context("train_aggregate", decisions=assigned, reports=lambda phase: {0: report})
        return [one["path"] for one in spec_of(rl.aggregate_train(ctx))["parts"]]

    return {
        "policy": lambda: str(context(decisions=published(named(POLICY))).policy.model),
        "merged": lambda: rl.learned_from(context("batch_prepare", decisions=merged)),
        "adopted": lambda: parts(adopted, {"tasks": [2]}),
        "report": lambda: parts([], {"part": named("part"), "tasks": [2]}),
        "batch": lambda: spec_of(
            update(context("update", decisions=batch, joins={}, accelerators=0, cpus=2))
        )["batch"],
        "update": lambda: str(rl.publish_weights(context("weights_publish", decisions=made)).folder),
    }


def test_what_decisions_name_is_looked_for_in_the_run() -> None:
    found = {name: read() for name, read in readers("{}").items()}
    rollouts, checkpoints = "/run/train_trajectories", "/run/checkpoints"
    assert found == {
        "policy": f"{checkpoints}/{POLICY}/model",
        "merged": [f"{rollouts}/merged"] * 2,
        "adopted": [f"{rollouts}/part"],
        "report": [f"{rollouts}/part"],
        "batch": f"{checkpoints}/batches/batch",
        "update": f"{checkpoints}/{POLICY}",
    }


@pytest.mark.parametrize("said", ("/outside/{}", "../../outside/{}", "outside/{}", "..", "{}\0"))
def test_what_leads_out_of_the_run_is_refused(said: str) -> None:
    for read in readers(said).values():
        with pytest.raises(ProgramFailed, match="which is no file in /run/"):
            read()
