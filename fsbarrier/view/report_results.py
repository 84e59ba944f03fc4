"""The report's tables of what rollouts and evaluations came to, by iteration; the CSV has the same figures (report_formats.py)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from fsbarrier.rundir.journal import Event
from fsbarrier.view.amounts import amount
from fsbarrier.view.history import History
from fsbarrier.view.html_pieces import table

#: iterations in a table, of the newest
TABLE_ROWS = 200
#: what the journal calls a figure of an evaluation (rewards/evaluation.py), also one of a set
EVALUATION_FIGURE = re.compile(r"([^/]+/)?(reward_mean|reward(/.+)?|pass_at_\d+|majority_at_\d+)(_se)?")

ROLLOUT_COLUMNS = {
    "reward_std": "spread of a group's rewards",
    "groups_without_signal": "groups without signal",
    "rounds": "rounds",
    "answer_tokens_mean": "tokens an answer, mean",
    "answer_tokens_min": "least",
    "answer_tokens_max": "most",
    "truncated_share": "share cut off",
    "left_out": "groups left out",
    "reward_errors": "reward failed",
    "agent_errors": "agent failed",
}


def rollouts_section(history: History) -> str:
    """What train rollouts came to beside their mean reward."""
    rollouts = history.reports("rolled_out")
    columns = rollout_columns(rollouts.values())
    if not columns:
        return ""
    return figures_table(rollouts, columns)


def figures_table(events: Mapping[int, Event], columns: Mapping[str, str]) -> str:
    """A line for each of the newest iterations. `columns`: a figure's name in the events -> what it is called."""
    body = [
        (str(iteration), *(amount_of(event.number(name)) for name in columns))
        for iteration, event in list(events.items())[-TABLE_ROWS:]
    ]
    return table(("iteration", *columns.values()), body)


def rollout_columns(rollouts: Collection[Event]) -> dict[str, str]:
    """The figures that some train rollout has, with what they are called; what was 0 all the time is left out."""
    parts = dict.fromkeys(
        name for event in rollouts for name in event.fields if name.startswith("reward_parts/")
    )
    known = {**ROLLOUT_COLUMNS, **{name: name.removeprefix("reward_parts/") for name in sorted(parts)}}
    return {
        name: title
        for name, title in known.items()
        if any(event.number(name) for event in rollouts) or (name in parts and not name.endswith("_failed"))
    }


def evaluations_section(history: History) -> str:
    """Each figure with its standard error; by set and by source where there are several."""
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
    """The names of the figures that some evaluation has: the mean reward, and with a set's or a source's name too."""
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
