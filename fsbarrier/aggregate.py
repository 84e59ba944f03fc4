"""Merges trajectory files; started by a phase or by a user.

`python -m fsbarrier.aggregate --spec SPEC.json` is the worker that a phase starts. `python -m fsbarrier.aggregate --log-path D
--iteration 5` (the same as `fsbarrier aggregate`) finds the ranks' files, finished or not, lists and merges them. Python API: `aggregate`,
`load` and `iter_trajectories`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from fsbarrier.data.merge import AggregateReport, MergeRequest, Part, collect, merge, publish
from fsbarrier.data.reader import iter_trajectories, load
from fsbarrier.processes import worker_contract
from fsbarrier.rewards.evaluation import figures
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import MergeReport, MergeSpec

__all__ = ["AggregateReport", "Part", "aggregate", "iter_trajectories", "load"]


def aggregate(
    parts: Sequence[Part],
    out: Path,
    *,
    metadata: dict[str, object],
    expected: Collection[int] | None,
    keep: int | None = None,
    allow_partial: bool = False,
) -> AggregateReport:
    """Merge the groups of `parts` into `out`, atomically (by rename); see `MergeRequest` and `merge`.

    Raises UsageError (missing tasks, a part that is no rank's file), StoreError.
    """
    wanted = None if expected is None else tuple(expected)
    request = MergeRequest(tuple(parts), out, metadata, wanted, keep, allow_partial)
    return merge(request)


# --- the worker -------------------------------------------------------------------------------------------------------


@MergeSpec.program
def work(spec: MergeSpec, settings: Settings, progress: worker_contract.ProgressWriter) -> MergeReport:
    """Merge according to the spec and return the report."""
    collected = collect(spec.request)
    evaluated = {} if spec.success is None else figures(collected.trajectories, spec.success)
    # The rewards of training sets count all groups that were rolled out, also those that are not merged.
    means = {
        task: mean
        for task, task_stats in collected.stats.items()
        if (mean := task_stats.reward_mean) is not None
    }
    report = publish(collected)
    progress.show(report.trajectories, report.trajectories, "trajectories", last=True)
    rewards = {
        f"train_reward/{name}": fmean(own)
        for name, tasks in spec.sets.items()
        if (own := [means[task] for task in tasks if task in means])
    }
    last_rewards = spec.last_rewards
    if last_rewards is not None:
        last_rewards = {**last_rewards, **{str(task): round(mean, 4) for task, mean in means.items()}}
    all_figures: dict[str, float | int | None] = {**report.figures, **evaluated, **rewards}
    return replace(
        MergeReport.from_json(asdict(report)),
        # An evaluation of several sets counts each set alike.
        reward_mean=all_figures.pop("reward_mean", report.reward_mean),
        figures=all_figures,
        last_rewards=last_rewards,
    )


def command_line(words: Sequence[str]) -> int:
    """`python -m fsbarrier.aggregate` as worker or command; returns the exit code."""
    if words and words[0] == "--spec":
        return worker_contract.run_worker(work)
    from fsbarrier.cli import main

    return main(["aggregate", *words])


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
