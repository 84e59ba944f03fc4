"""The report: one self-contained HTML file without scripts or external resources, with light and dark mode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

import fsbarrier
from fsbarrier.protocol.revisions import shown as plain
from fsbarrier.protocol.wording import counted
from fsbarrier.rundir.phase_time import PARTS
from fsbarrier.settings.hidden import shown
from fsbarrier.settings.sources import flatten
from fsbarrier.view.amounts import amount, duration, one_line, percent
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.html_pieces import LEAST_SHARE, chart, legend, section, table
from fsbarrier.view.report_charts import BarPiece, Series, line_chart, stacked_bars
from fsbarrier.view.report_results import TABLE_ROWS, evaluations_section, figures_table, rollouts_section
from fsbarrier.view.report_samples import samples
from fsbarrier.view.report_style import STYLE
from fsbarrier.view.report_timelines import timelines
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import IterationTime, row_times, together
from fsbarrier.view.wastes import parts_by_iteration, parts_by_phase, wastes

#: maximum numbers to show, newest first: iterations as bars, events
BARS = 60
EVENT_ROWS = 500

UPDATE_COLUMNS = {
    "loss": "loss",
    "logprob_gap_mean": "log-prob gap, mean",
    "logprob_gap_max": "max",
    "clip_fraction": "clipped",
    "clipped_low": "clipped below",
    "clipped_high": "clipped above",
    "entropy": "entropy",
    "kl": "KL to the reference policy",
    "policy_kl": "KL to the previous policy",
    "mismatch_kl": "KL between engine and trainer",
    "mismatch_dropped": "share with weight 0",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "optimizer_steps": "steps",
    "seconds": "seconds",
}


def page(reader: RunReader, status: RunStatus, *, iterations: int = 3, with_samples: bool = True) -> str:
    """The whole report. `iterations`: number of recent iterations with a timeline; `with_samples`: include some prompts and answers."""
    finished = status.finished_times
    sections = [
        _head(reader, status),
        _tiles(status, finished, reader),
        _problems(status),
        section("Mean reward by iteration", _rewards(status, reader)),
        section(
            "Sample trajectories",
            samples(reader.paths, status.iteration, status.run_id) if with_samples else "",
        ),
        section("Where the time goes", _times(finished)),
        section("Start, load, work, save, wait", _parts(reader, finished)),
        section("The last iterations, node by node", timelines(reader, status, iterations)),
        section("Coordination", _coordination(finished)),
        section("Rollouts", rollouts_section(reader.history)),
        section("Evaluations", evaluations_section(reader.history)),
        section("Updates", _updates(reader)),
        section("Nodes", _nodes(status)),
        section("What happened", _events(reader)),
        section("Settings", _settings(reader)),
    ]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    title = escape(f"fsbarrier run {status.run_id}")
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(section for section in sections if section)
        + f"<footer>made by fsbarrier {escape(fsbarrier.__version__)} on {made} from "
        f"<code>{escape(status.log_path)}</code></footer></main></body></html>\n"
    )
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", "", html)


# --- top --------------------------------------------------------------------------------------------------------------------


def _head(reader: RunReader, status: RunStatus) -> str:
    record = reader.record
    of = f" of {status.iterations}" if status.iterations is not None else ""
    facts = [
        f"program {status.program}",
        counted(status.num_nodes, "node"),
        f"iteration {status.iteration}{of}",
        f"started {record.created} by {record.created_by}",
        *([f"model {record.model}"] if record.model else []),
    ]
    return (
        f'<header><h1>{escape(status.run_id)} <span class="state {escape(status.state)}">{escape(status.state)}</span></h1>'
        f"<p>{escape(one_line(' · '.join(facts)))}</p></header>"
    )


def _tiles(status: RunStatus, finished: Sequence[IterationTime], reader: RunReader) -> str:
    tiles = []
    for name, values in (
        ("held-out reward", [r.test for r in status.rewards if r.test is not None]),
        ("train reward", [r.train for r in status.rewards if r.train is not None]),
    ):
        if values:
            first = f"{amount(values[0])} → " if len(values) > 1 else ""
            tiles.append((name, f"{first}{amount(values[-1])}", f"best {amount(max(values))}"))
    if finished:
        total, count = together(finished), len(finished)
        tiles.append(("time per iteration", duration(total.seconds / count), f"mean of {count}"))
        clocks = "on one clock" if total.exact else "by the hosts' wall clocks"
        note = f"{duration(total.coordination_s / count)} per iteration, {clocks}"
        tiles.append(("coordination", percent(total.share), note))
    losses = len(reader.history.losses)
    tiles.append(("nodes lost", str(losses), ""))
    listed = "".join(
        f"<div><small>{escape(name)}</small><b>{escape(value)}</b><small>{escape(note)}</small></div>"
        for name, value, note in tiles
    )
    return f'<div class="tiles">{listed}</div>'


def _problems(status: RunStatus) -> str:
    listed = "".join(
        f"<li{' class=said' if problem.startswith(' ') else ''}>{escape(one_line(problem))}</li>"
        for problem in status.problems
    )
    return f'<ul class="problems">{listed}</ul>' if listed else ""


# --- curves and times ---------------------------------------------------------------------------------------------------------


def _rewards(status: RunStatus, reader: RunReader) -> str:
    train = [(float(one.iteration), one.train) for one in status.rewards if one.train is not None]
    test = [(float(one.iteration), one.test) for one in status.rewards if one.test is not None]
    curves = [Series("train reward", "train", train), Series("held-out reward", "test", test)]
    curves = [one for one in curves if one.points]
    if not curves:
        return ""
    body = [
        (
            str(one.iteration),
            _value(one.policy_version),
            amount(one.train),
            amount(one.test),
            _value(one.trajectories),
        )
        for one in status.rewards[-TABLE_ROWS:]
    ]
    figures = table(("iteration", "policy version", "train", "held-out", "trajectories"), body)
    return (
        legend((one.style, one.name) for one in curves)
        + chart(line_chart(curves, "iteration", _changes(reader)), newest=True)
        + f"<details><summary>figures</summary>{figures}</details>"
    )


def _changes(reader: RunReader) -> dict[int, str]:
    """Iteration -> the settings that changed there."""
    found: dict[int, str] = {}
    for one in reader.revisions:
        text = ", ".join(
            f"{name} {plain(one.before.get(name))} → {plain(value)}" for name, value in one.values.items()
        )
        found[one.iteration] = "; ".join(filter(None, (found.get(one.iteration), one_line(text))))
    return found


def _times(finished: Sequence[IterationTime]) -> str:
    if not finished:
        return ""
    shown = finished[-BARS:]
    bars = []
    for one in shown:
        parts = [BarPiece(f"p{index}", name, seconds) for (index, name), seconds in one.work.items()]
        parts.append(BarPiece("coordination", "coordination", one.coordination_s))
        bars.append((str(one.iteration), parts))
    total = together(shown)
    entries = [
        (f"p{index}", f"{name} {duration(seconds / len(shown))}")
        for (index, name), seconds in total.work.items()
        if seconds >= LEAST_SHARE * total.seconds
    ]
    entries.append(("coordination", f"coordination {duration(total.coordination_s / len(shown))}"))
    hidden = (
        f"<p>The last {len(shown)} of {counted(len(finished), 'iteration')}.</p>"
        if len(finished) > BARS
        else ""
    )
    return hidden + legend(entries) + chart(stacked_bars(bars, "iteration"), newest=True)


def _parts(reader: RunReader, finished: Sequence[IterationTime]) -> str:
    """The largest time losses, and each phase's time split into parts."""
    shown = {one.iteration for one in finished[-BARS:]}
    spans = [span for span in reader.spans() if span.iteration in shown]
    if not spans:
        return ""
    sentences = "".join(f"<li>{escape(one.sentence())}</li>" for one in wastes(spans, row_times(spans)))
    times = parts_by_phase(parts_by_iteration(spans), shown)
    names = {span.phase: one_line(span.phase_name) for span in spans}
    bars, body = [], []
    for phase, time in times.items():
        parts = time.parts()
        bars.append((str(phase), [BarPiece(part, part, seconds) for part, seconds in parts.items()]))
        body.append((str(phase), names[phase], *(duration(seconds) for seconds in parts.values())))
    figures = table(("phase", "", *PARTS), body, left=(1,))
    return (
        f"<p>Largest time losses in the last {counted(len(shown), 'iteration')}:</p><ul>{sentences}</ul>"
        "<p>Time per node in each phase, averaged over all nodes and these iterations.</p>"
        + legend((part, part) for part in PARTS)
        + chart(stacked_bars(bars, "phase"))
        + f"<details><summary>figures</summary>{figures}</details>"
    )


def _coordination(finished: Sequence[IterationTime]) -> str:
    if not finished:
        return ""
    figures = table(
        ("iteration", "seconds", "coordination", "share", "cut short"),
        (
            (
                str(one.iteration),
                f"{one.seconds:.2f}",
                duration(one.coordination_s),
                percent(one.share),
                duration(one.cut_short_s) if one.cut_short_s else "–",
            )
            for one in finished[-TABLE_ROWS:]
        ),
    )
    about = ""
    if not together(finished).exact:
        about = " The nodes run on several hosts, so this is only as accurate as their wall clocks."
    return (
        "<p>Time from the end of the last node's work until the last node has started the next phase, summed over all phases of an "
        f"iteration.{about}</p>{figures}"
    )


# --- tables -------------------------------------------------------------------------------------------------------------------


def _updates(reader: RunReader) -> str:
    updates = reader.history.reports("updated")
    columns = {
        field: name
        for field, name in UPDATE_COLUMNS.items()
        if any(update.number(field) is not None for update in updates.values())
    }
    if not columns:
        return ""
    return figures_table(updates, columns)


def _nodes(status: RunStatus) -> str:
    return table(
        ("node", "host", "process", "start", "state", "logs"),
        (
            (
                f"{node.node_rank}{' (leader)' if node.node_rank == status.leader else ''}",
                node.host or "–",
                _value(node.pid),
                _value(node.incarnation),
                node.state,
                node.logs or "–",
            )
            for node in status.nodes
        ),
        left=(0, 1, 4, 5),
    )


def _events(reader: RunReader) -> str:
    worded = [(event, text) for event in reader.history.newest_events() if (text := event_text(event))]
    if not worded:
        return ""
    body = [
        (
            datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            str(event.generation),
            str(event.node_rank),
            text,
        )
        for event, text in worded[-EVENT_ROWS:]
    ]
    hidden = f"<p>The newest {EVENT_ROWS} of {len(worded)}.</p>" if len(worded) > EVENT_ROWS else ""
    return hidden + table(("time (UTC)", "generation", "reported by node", "event"), body, left=(0, 3))


def _settings(reader: RunReader) -> str:
    changed: dict[str, list[str]] = {}
    for one in reader.revisions:
        for name, old in one.before.items():
            changed.setdefault(name, []).append(f"{plain(old)} before iteration {one.iteration} ({one.by})")
    body = [
        (key, _value(value), "; ".join(changed.get(key, ())))
        for key, value in flatten(shown(reader.settings.as_json()), ()).items()
    ]
    figures = table(("setting", "value", "changed"), body, left=(0, 1, 2))
    digest = escape(reader.record.settings_digest[:12])
    return f"<details><summary>{len(body)} settings (digest at the start of the run: {digest})</summary>{figures}</details>"


def _value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
