"""What is wrong with a run and its nodes, in words for a person who has to act on it."""

from __future__ import annotations

from collections.abc import Sequence

from fsbarrier.view.amounts import duration, one_line, ranks
from fsbarrier.view.node_status import NodeStatus
from fsbarrier.view.run_reader import RunReader


def problems(reader: RunReader, nodes: Sequence[NodeStatus], state: str) -> list[str]:
    """What a person should know, the worst first; one line each. A line that begins with a blank is a program's output."""
    found = []
    verdict = reader.newest.verdict if reader.newest is not None else None
    if verdict is not None and state == "broken":
        found += verdict.reason.splitlines()
    for node in nodes:
        name = f"node {node.node_rank}{f' ({node.host})' if node.host else ''}"
        if node.state == "absent" and reader.newest is None:
            found.append(f"{name} has not been started yet")
        elif node.state == "suspected":
            found.append(f"{name}: no heartbeat while it was watched for {duration(node.silent_s or 0.0)}")
        elif node.state == "lost":
            found.append(f"{name} is lost: {_why_lost(reader, node)}")
    if state != "broken" or verdict is None:
        found += _early_endings(reader, nodes)
    if state in ("running", "stalled") or (state == "broken" and reader.newest and verdict is None):
        found += _failures(reader)
    if state == "stalled" and nodes and all(node.state in ("lost", "left", "absent") for node in nodes):
        found.append("no node of this run is alive; started again, it goes on where it was")
    found += [one_line(fault) for fault in reader.faults]
    return list(dict.fromkeys(found))


def _why_lost(reader: RunReader, node: NodeStatus) -> str:
    """How it is known that a node is lost: the others found out, or its process is not there."""
    member = reader.newest is not None and reader.newest.incarnation_of(node.node_rank) == node.incarnation
    known = [loss.why for loss in reader.history.losses if loss.node_rank == node.node_rank]
    if known and not member:
        return known[-1]
    return f"process {node.pid} is gone" if reader.process_gone(node.node_rank) else "no news"


def _early_endings(reader: RunReader, nodes: Sequence[NodeStatus]) -> list[str]:
    """Why nodes left before the run's end, each reason once."""
    reasons: dict[str, list[int]] = {}
    for node in nodes:
        ending = reader.history.endings.get(node.node_rank)
        if node.state in ("left", "broken") and ending is not None:
            reasons.setdefault(one_line(ending.reason), []).append(node.node_rank)
    return [
        f"node{'s' if len(who) > 1 else ''} {ranks(who)} ended: {reason}" for reason, who in reasons.items()
    ]


def _failures(reader: RunReader) -> list[str]:
    """The programs that failed in the iteration under way, each once, with what they wrote last."""
    failures = [one for one in reader.history.failures if one.iteration == reader.position[1]]
    latest = {(one.node_rank, one.phase): one for one in failures}
    found = []
    for key, failure in list(latest.items())[-3:]:
        tries = sum((one.node_rank, one.phase) == key for one in failures)
        times = f" ({tries} times)" if tries > 1 else ""
        phase = f"{failure.phase} {failure.phase_name}"
        where = f"node {failure.node_rank}, iteration {failure.iteration}, phase {phase}"
        found.append(f"{where} failed{times}: {one_line(failure.error)}")
        found += [f"  | {one_line(line)}" for line in failure.log[-5:]]
    return found
