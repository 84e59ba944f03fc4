"""The node table of `status` and the live view: position, progress and heartbeat age of each node."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fsbarrier.rundir.journal import Fields, number, text
from fsbarrier.view.node_status import NodeStatus
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.terminal_lines import STATE_STYLE, bar, line
from fsbarrier.wording import amount, counted, one_line, ranks, short

#: width of a progress bar, in cells
BAR_CELLS = 12
#: If not all nodes fit, nodes in these states are shown first, in this order.
TROUBLED_FIRST = {"lost": 0, "suspected": 0, "broken": 0, "left": 1, "absent": 1, "joining": 1}


def nodes_table(status: RunStatus, width: int, most: int | None = None) -> RenderableType:
    """One row per node, plus one per environment, and per engine if it has several or frozen ones, as far as they fit in `most` rows;
    troubled nodes first."""
    nodes, hidden = _chosen(status.nodes, most)
    engines = {node.node_rank: _engines(node) for node in nodes}
    if most is not None and len(nodes) + sum(map(len, engines.values())) > most:
        engines = {}
    hosts = {node.host for node in status.nodes if node.host}
    many_hosts = len(hosts) > 1
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, width=width, expand=True)
    table.add_column("node", style="bold", no_wrap=True, min_width=4)
    if many_hosts:
        table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=16, min_width=5)
    table.add_column("state", no_wrap=True, min_width=9)
    table.add_column("phase", no_wrap=True, overflow="ellipsis", min_width=10, max_width=21)
    table.add_column("progress", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("beat", justify="right", no_wrap=True, min_width=4)
    for node in nodes:
        state_style = "yellow" if node.activity == "waiting" else STATE_STYLE.get(node.state, "")
        table.add_row(
            f"{node.node_rank}{'*' if node.node_rank == status.leader else ''}",
            *([line(one_line(node.host or "–"))] if many_hosts else []),
            line((node.activity or node.state, state_style)),
            line(_phase(status, node)),
            _progress(status, node),
            line(_beat(node)),
        )
        for state, doing in engines.get(node.node_rank, ()):
            table.add_row(
                "", *([""] if many_hosts else []), line(state), line(doing[0]), line((doing[1], "dim"))
            )
    if hidden:
        table.add_row("…", *([""] if many_hosts else []), line((f"{hidden} more", "dim")))
    return table


def _engines(node: NodeStatus) -> list[tuple[str | tuple[str, str], tuple[str, str]]]:
    """(state, (name, activity)) of each frozen engine of a node, and during a rollout of each environment and of the policy's engines, if
    there are several."""
    listed, environments = [(node.progress or {}).get(name) for name in ("engines", "environments")]
    rows: list[tuple[str | tuple[str, str], tuple[str, str]]] = []
    # A user's own program may report anything under that name.
    for engine in listed if isinstance(listed, list) else ():
        if isinstance(engine, dict):
            doing = f"{short(number(engine, 'sequences') or 0)} sequences, {short(number(engine, 'tokens') or 0)} tokens so far"
            name = f"engine {number(engine, 'replica') or 0:.0f}"
            rows.append(("up" if engine.get("up") else ("down", "bold yellow"), (name, doing)))
    named = {f"engines.{name}": engine for name, engine in node.engines.items()}
    for name, shown in {**named, **(environments if isinstance(environments, dict) else {})}.items():
        if isinstance(shown, dict):
            listed_states, restarts = shown.get("states"), int(number(shown, "restarts") or 0)
            states = [*map(str, listed_states)] if isinstance(listed_states, list) else []
            state = next(
                (problem for problem in ("down", "starting") if problem in states),
                states[0] if states else "off",
            )
            details = [f"restarted {counted(restarts, 'time')}: {text(shown, 'why')}"] if restarts else []
            if (sessions := number(shown, "sessions")) is not None:
                most = "" if (limit := number(shown, "most")) is None else f"/{limit:.0f}"
                details.insert(
                    0, f"sessions {sessions:.0f}{most}, {number(shown, 'waiting') or 0:.0f} waiting"
                )
            row = (one_line(name), one_line("; ".join(details)))
            rows.append(((state, "bold yellow") if state == "down" else state, row))
    return rows


def _chosen(nodes: Sequence[NodeStatus], most: int | None) -> tuple[list[NodeStatus], int]:
    """The nodes to show, and the number of hidden ones."""
    if most is None or len(nodes) <= most:
        return list(nodes), 0
    first = sorted(nodes, key=lambda node: (TROUBLED_FIRST.get(node.state, 2), node.node_rank))
    chosen = first[: max(0, most - 1)]
    return sorted(chosen, key=lambda node: node.node_rank), len(nodes) - len(chosen)


def _phase(status: RunStatus, node: NodeStatus) -> str:
    if node.phase is None or node.state in ("lost", "absent"):
        return ""
    behind = "" if node.iteration == status.iteration else f" (iteration {node.iteration})"
    return f"{node.phase.index} {one_line(node.phase.name)}{behind}"


def _beat(node: NodeStatus) -> str | tuple[str, str]:
    if node.state == "suspected":
        age = max(node.last_beat_age_s or 0.0, node.silent_s or 0.0)
        return f">{age:.0f} s" if age >= 1 else f">{age:.1f} s", "bold yellow"
    return "–" if node.last_beat_age_s is None else (f"{node.last_beat_age_s:.0f} s", "dim")


def _progress(status: RunStatus, node: NodeStatus) -> Text:
    """A node's progress in its phase, or the nodes it is waiting for."""
    if node.progress:
        return progress_bar(node.progress)
    awaited = status.waiting_for.node_ranks if status.waiting_for else ()
    if node.activity == "waiting" and awaited and node.node_rank not in awaited:
        return line((f"waiting for node{'s' if len(awaited) > 1 else ''} {ranks(awaited)}", "dim"))
    return line()


def progress_bar(progress: Fields) -> Text:
    """A node's progress: bar, done/total, reward so far, tokens per second. The table cuts off what does not fit."""
    if awaits := one_line(text(progress, "awaits")):
        return line((awaits, "yellow"))
    done, total = number(progress, "done"), number(progress, "total")
    note = one_line(text(progress, "note"))
    if done is None or total is None or total <= 0:
        return line((note, "dim"))
    reward, speed = number(progress, "reward_mean"), number(progress, "tokens_per_s")
    beside = [
        f"  reward {amount(reward)}" if reward is not None else "",
        f"  {short(speed)} tokens/s" if speed is not None else "",
        f"  {note}" if note else "",
    ]
    return line(bar(done / total, BAR_CELLS, "green"), f" {done:.0f}/{total:.0f}", ("".join(beside), "dim"))
