"""The report's tables of rollout and evaluation metrics by iteration; the CSV has the same values (report_formats.py)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from fsbarrier.rundir.journal import Event
from fsbarrier.view.amounts import amount
from fsbarrier.view.history import RunHistory
from fsbarrier.view.html_pieces import table

#: maximum number of iterations in a table, newest first
TABLE_ROWS = 200
#: names of evaluation metrics in the journal (rewards/evaluation.py), with an optional set name
EVALUATION_FIGURE = re.compile(r"([^/]+/)?(reward_mean|reward(/.+)?|pass_at_\d+|majority_at_\d+)(_se)?")

ROLLOUT_COLUMNS = {
    "reward_std": "std of rewards within a group",
    "groups_without_signal": "groups without signal",
    "rounds": "rounds",
    "answer_tokens_mean": "tokens per answer, mean",
    "answer_tokens_min": "least",
    "answer_tokens_max": "most",
    "truncated_share": "share truncated",
    "left_out": "groups dropped",
    "reward_errors": "reward failed",
    "agent_errors": "agent failed",
}


def rollouts_section(history: RunHistory) -> str:
    """The metrics of training rollouts other than the mean reward."""
    rollouts = history.reports("rolled_out")
    columns = rollout_columns(rollouts.values())
    if not columns:
        return ""
    return figures_table(rollouts, columns)


def figures_table(events: Mapping[int, Event], columns: Mapping[str, str]) -> str:
    """A row for each of the newest iterations. `columns`: metric name in the events -> column title."""
    body = [
        (str(iteration), *(amount_of(event.number(name)) for name in columns))
        for iteration, event in list(events.items())[-TABLE_ROWS:]
    ]
    return table(("iteration", *columns.values()), body)


def rollout_columns(rollouts: Collection[Event]) -> dict[str, str]:
    """The metrics of the training rollouts with their titles, without those that were always 0."""
    parts = dict.fromkeys(
        name for event in rollouts for name in event.fields if name.startswith("reward_parts/")
    )
    known = {**ROLLOUT_COLUMNS, **{name: name.removeprefix("reward_parts/") for name in sorted(parts)}}
    return {
        name: title
        for name, title in known.items()
        if any(event.number(name) for event in rollouts) or (name in parts and not name.endswith("_failed"))
    }


def evaluations_section(history: RunHistory) -> str:
    """The evaluation metrics with standard errors, by set and by source if there are several."""
    evaluations = history.reports("evaluated")
    columns = [name for name in evaluation_figures(evaluations.values()) if not name.endswith("_se")]
    if not columns:
        return ""
    body = [
        (
            str(iteration),
            str(event.integer("policy_version")),
            *(_with_error(event, name) for name in columns),
        )
        for iteration, event in list(evaluations.items())[-TABLE_ROWS:]
    ]
    return table(("iteration", "policy version", *columns), body)


def evaluation_figures(evaluations: Iterable[Event]) -> list[str]:
    """The metric names of the evaluations, including those per set and per source."""
    found: dict[str, None] = {}
    for event in evaluations:
        found |= {name: None for name in event.fields if EVALUATION_FIGURE.fullmatch(name)}
    return list(found)


def _with_error(event: Event, name: str) -> str:
    value = event.number(name)
    error = event.number(f"{name.removesuffix('_mean')}_se")
    return amount(value) + (f" ± {amount(error)}" if value is not None and error is not None else "")


def amount_of(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"
