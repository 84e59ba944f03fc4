"""Evaluation metrics: mean reward, pass@k and majority@k over tasks, each with its standard error.

pass@k (Chen et al. 2021, arXiv 2107.03374): the probability that at least one of k samples is a success, with the unbiased estimator over
all n samples. majority@n: whether the most frequent answer is a success; for ties, the share of tied answers that are. An answer is the
`pred` of a reward function, else its last number, else its text. Standard errors are those of means over tasks, so they do not
generalize to other kinds of tasks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from fsbarrier.data.trajectory import Trajectory, is_judged
from fsbarrier.rewards.matching import last_number

#: maximum number of sources with their own metrics
MOST_SOURCES = 20


def figures(trajectories: Iterable[Trajectory], success: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a merged evaluation, in which the groups of a set are contiguous. `success`: minimum reward of a solved trajectory, by
    set name ("" for a single set). With several sets, each has its own metrics (`aime/reward`), and `reward_mean` is the unweighted mean
    over sets.
    """
    metrics: dict[str, float] = {}
    means = []
    for name, of_set in groupby(trajectories, key=lambda trajectory: trajectory.get("eval_set", "")):
        of_one = _figures_of_one(of_set, success=success[name])
        if not name:
            # The mean is already included under its own name.
            of_one.pop("reward", None)
            return of_one
        metrics |= {f"{name}/{figure}": value for figure, value in of_one.items()}
        means += [of_one["reward"]] if "reward" in of_one else []
    return {**metrics, "reward_mean": statistics.fmean(means)} if means else metrics


def powers_up_to(samples: int) -> list[int]:
    """The powers of two up to `samples`, and `samples` itself."""
    return sorted({*(1 << power for power in range(samples.bit_length())), samples})


def _figures_of_one(trajectories: Iterable[Trajectory], *, success: float) -> dict[str, float]:
    means: list[float] = []
    passed: dict[int, list[float]] = {}
    majorities: dict[int, list[float]] = {}
    by_source: dict[str, list[float]] = {}
    for _, together in groupby(trajectories, key=lambda trajectory: trajectory["task_index"]):
        group = [trajectory for trajectory in together if is_judged(trajectory)]
        if not group:
            continue
        rewards = [float(trajectory["reward"]) for trajectory in group]
        solved = [reward >= success for reward in rewards]
        means.append(statistics.fmean(rewards))
        for k in powers_up_to(len(group)):
            passed.setdefault(k, []).append(pass_at(k, len(group), sum(solved)))
        if len(group) > 1:
            answers = [answer_of(trajectory) for trajectory in group]
            majorities.setdefault(len(group), []).append(majority(answers, solved))
        source = group[0]["metadata"].get("data_source")
        if source is not None:
            by_source.setdefault(str(source), []).append(means[-1])
    metrics = _with_error("reward", means)
    for k, values in sorted(passed.items()):
        # Skip k unless all tasks have enough scored samples; otherwise the mean would be over a different selection of tasks.
        if k > 1 and len(values) == len(means):
            metrics |= _with_error(f"pass_at_{k}", values)
    for k, values in majorities.items():
        if len(values) == len(means):
            metrics |= _with_error(f"majority_at_{k}", values)
    for source in sorted(by_source)[:MOST_SOURCES]:
        metrics |= _with_error(f"reward/{source}", by_source[source])
    return metrics


def pass_at(k: int, samples: int, solved: int) -> float:
    return 1 - math.comb(samples - solved, k) / math.comb(samples, k)


def majority(answers: Sequence[object], solved: Sequence[bool]) -> float:
    """majority@n of one task (see above). `solved`: which of its answers are correct."""
    counted = Counter(answers).most_common()
    frequent = [answer for answer, count in counted if count == counted[0][1]]
    return statistics.fmean(solved[answers.index(answer)] for answer in frequent)


def answer_of(trajectory: Mapping[str, object]) -> object:
    metadata, parts = trajectory["metadata"], trajectory.get("reward_parts")
    for where in (parts, metadata.get("reward_info") if isinstance(metadata, Mapping) else None):
        if isinstance(where, Mapping) and "pred" in where:
            return where["pred"]
    text = str(trajectory.get("text", ""))
    number = last_number(text)
    return text.strip() if number is None else number


def _with_error(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    metrics = {name: statistics.fmean(values)}
    if len(values) > 1:
        metrics[f"{name}_se"] = statistics.stdev(values) / math.sqrt(len(values))
    return metrics
