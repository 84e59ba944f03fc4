"""A run's metrics for other programs: CSV, a Perfetto trace, and text for Prometheus's textfile collector.

Perfetto: the trace event format (JSON), complete events in microseconds. Prometheus: the text exposition format 0.0.4.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping

from fsbarrier.rundir.journal import Event
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import Span

Row = dict[str, object]
#: event -> the prefix of its columns, the fields that become columns, and those that do even if they were always 0: parts of a reward,
#: and the metrics of evaluations (rewards/evaluation.py), with an optional set name
MEASURES = {
    "rolled_out": (
        "rollout",
        re.compile(
            "reward_std|groups_without_signal|rounds|left_out|(reward|agent|environment)_errors|answer_tokens_(mean|min|max)"
            "|truncated_share|segments_per_episode|(reasoning|response|thoughts_closed)_share|(reward_parts|train_reward)/.+"
        ),
        re.compile("(reward_parts|train_reward)/.+(?<!_failed)"),
    ),
    "evaluated": (
        "eval",
        re.compile(r"(?!reward_mean$)([^/]+/)?(reward_mean|reward(/.+)?|pass_at_\d+|majority_at_\d+)(_se)?"),
        re.compile(".+"),
    ),
    # All numeric fields except times and positions.
    "updated": (
        "update",
        re.compile(r"(?!(node_rank|incarnation|generation|iteration|phase|policy_version)$).+(?<!_s)"),
        re.compile("(?!)"),
    ),
    "weights_published": ("moved", re.compile(".+_bytes"), re.compile("(?!)")),
    "batch_prepared": ("batch", re.compile("staleness"), re.compile("(?!)")),
}


def csv_table(reader: RunReader, status: RunStatus) -> str:
    """One line per iteration: rewards, seconds by phase, metrics of the update. Unknown values are empty."""
    rows = iteration_rows(reader, status)
    columns: dict[str, None] = {}
    for row in rows.values():
        columns |= dict.fromkeys(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns) or ["iteration"], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[iteration] for iteration in sorted(rows))
    return text.getvalue()


def iteration_rows(reader: RunReader, status: RunStatus) -> dict[int, Row]:
    """The values by iteration, for tables, curves and trackers. All iterations use the same column order."""
    reports = {name: reader.history.reports(name) for name in MEASURES}
    measured = {name: _measured(name, events.values()) for name, events in reports.items()}
    times = {timing.iteration: timing for timing in status.times}
    rewards = {reward.iteration: reward for reward in status.rewards}
    phases = sorted({phase for timing in status.times for phase in timing.phases})
    rows_by_iteration: dict[int, Row] = {}
    for iteration in sorted({*reports["updated"], *times, *rewards}):
        reward, time = rewards.get(iteration), times.get(iteration)
        row: Row = {
            "iteration": iteration,
            "policy_version": reward.policy_version if reward else None,
            "train_reward": reward.train if reward else None,
            "test_reward": reward.test if reward else None,
            "trajectories": reward.trajectories if reward else None,
            "seconds": time.seconds if time else None,
            "coordination_s": time.coordination_s if time else None,
        }
        row |= {
            f"{column(name)}_s": time.phases.get((number, name)) if time else None for number, name in phases
        }
        for name, fields in measured.items():
            event, prefix = reports[name].get(iteration), MEASURES[name][0]
            row |= {f"{prefix}_{column(field)}": event.number(field) if event else None for field in fields}
        rows_by_iteration[iteration] = row
    return rows_by_iteration


def _measured(name: str, events: Collection[Event]) -> list[str]:
    """The fields of these events that become columns, without those that were always 0, such as a KL that is not computed."""
    fields: dict[str, None] = {}
    for event in events:
        fields |= dict.fromkeys(event.fields)
    wanted, zeros = MEASURES[name][1:]
    return [
        field
        for field in fields
        if wanted.fullmatch(field)
        and (zeros.fullmatch(field) or any(event.number(field) for event in events))
    ]


def column(phase: str) -> str:
    """A phase's name as a column or metric name, sanitized because a spreadsheet could take it for a formula."""
    return re.sub(r"\W", "_", phase, flags=re.ASCII)


def perfetto_trace(reader: RunReader) -> str:
    """A trace for ui.perfetto.dev with one process per node and two tracks each: rows, and their start, load, work and save parts.

    Times are wall-clock times.
    """
    return json.dumps({"traceEvents": [*_trace_events(reader)], "displayTimeUnit": "ms"})


def _trace_events(reader: RunReader) -> Iterator[Row]:
    spans = reader.spans()
    for rank in sorted({span.node_rank for span in spans}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"node {rank}"}}
        for thread, name in enumerate(("phases", "work")):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
    for span in spans:
        yield _complete(span, 0, span.began_at, span.seconds)
        worked = {part: s for part, s in span.time.parts().items() if part != "wait" and s > 0}
        if span.done_at is None or not worked:
            continue
        at = span.done_at - sum(worked.values())
        for part, seconds in worked.items():
            yield _complete(span, 1, at, seconds, part)
            at += seconds


def _complete(span: Span, thread: int, began_at: float, seconds: float, part: str = "") -> Row:
    about = {"iteration": span.iteration, "generation": span.generation, "outcome": span.outcome}
    return {
        "ph": "X",
        "name": f"{span.phase_name}: {part}" if part else span.phase_name,
        "cat": "phase",
        "pid": span.node_rank,
        "tid": thread,
        "ts": round(began_at * 1e6),
        "dur": round(seconds * 1e6),
        "args": about,
    }


def prometheus_text(reader: RunReader, status: RunStatus) -> str:
    """The run's position, and the latest value of each metric in the table."""
    newest: dict[str, object] = {}
    for row in iteration_rows(reader, status).values():
        newest |= {name: value for name, value in row.items() if value is not None}
    alive = sum(node.state == "running" for node in status.nodes)
    values = {
        "generation": status.generation,
        **newest,
        "iteration": status.iteration,
        "nodes": status.num_nodes,
    }
    values |= {"nodes_running": alive, "nodes_lost_total": len(reader.history.losses)}
    label = _label({"run": status.run_id})
    lines = []
    for name, value in values.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE fsbarrier_{name} {kind}", f"fsbarrier_{name}{label} {value}"]
    lines += [
        "# TYPE fsbarrier_state gauge",
        f"fsbarrier_state{_label({'run': status.run_id, 'state': status.state})} 1",
    ]
    return "\n".join([*lines, ""])


def _label(values: Mapping[str, str]) -> str:
    pairs = []
    for name, value in values.items():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{name}="{escaped}"')
    return "{" + ",".join(pairs) + "}"
