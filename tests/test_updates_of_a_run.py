"""What the journal says of updates that go on from each other, also over a restart and in processes that are started anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from complete_runs import Bench

pytestmark = pytest.mark.torch

#: One optimizer step an update, whatever the rollouts were.
ONE_STEP = ("--eval-interval", "0", "trainer.minibatch=64", "algorithm.max_logprob_gap=100")


@pytest.mark.parametrize("keep", ["process", "nothing"])
def test_a_schedule_of_learning_rates_goes_on_from_update_to_update(
    bench: Bench, tmp_path: Path, keep: str
) -> None:
    schedule = ("optimizer.lr=8e-6", "optimizer.warmup_steps=2", "optimizer.schedule=linear")
    more = (*ONE_STEP, *schedule, "optimizer.decay_steps=6")
    # The second session is a restart.
    for last in (2, 4):
        words = ("--iterations", str(last), f"trainer.keep={keep}")
        ended = bench.run(tmp_path / "run", *words, *more).check()
    rates = [event["lr"] for event in ended.events("updated")]
    assert rates == pytest.approx([4e-6, 8e-6, 6e-6, 4e-6])


def test_replayed_samples_are_corrected_for_the_policy_that_sampled_them(
    bench: Bench, tmp_path: Path
) -> None:
    """In an update's only step this policy's own samples have the ratio 1, and so no divergence; those of an earlier policy have one."""

    def updates(name: str, recency: int) -> list[dict[str, Any]]:
        learning = ("optimizer.lr=0.03", "optimizer.warmup_steps=0", "algorithm.old_logprobs=trainer")
        iterations = ("--iterations", "2", f"update.recency={recency}")
        run = tmp_path / name
        # The second update is of a session of its own.
        bench.run(run, *ONE_STEP, *learning, "--iterations", "1", *iterations[2:]).check()
        return bench.run(run, *ONE_STEP, *learning, *iterations).check().events("updated")

    (first, own), (_, mixed) = updates("own", 1), updates("mixed", 2)
    assert own["replayed"] == 0 and mixed["replayed"] > 0
    assert first["policy_kl"] == pytest.approx(0, abs=1e-9) == own["policy_kl"]
    assert mixed["policy_kl"] > 1e-4
