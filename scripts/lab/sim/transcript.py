"""Renders a schedule as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.facts import Generation
from sim.history import History, JournalLine, RowPlace, Said, place_of
from sim.invariants import Violation

WIDTH = 150


def transcript(history: History) -> str:
    """The whole transcript."""
    told = [line for line in _lines(history.told) if line.text]
    return "".join(map(_rendered, told)).replace(history.root, "/run")


def violations(found: Iterable[Violation]) -> str:
    """Violations, one a line."""
    return "".join(f"{violation.number}: {violation.what}\n" for violation in found)


def _lines(told: Iterable[JournalLine | Said]) -> Iterator[Said]:
    """One line for each event; without text if it is not interesting."""
    passed: set[RowPlace] = set()
    begun: set[int] = set()
    for event in told:
        if isinstance(event, Said):
            yield event
            continue
        node, text, mark = event.node, "", "-"
        who = f"node {node.rank}"
        match event.event:
            case "node_joined":
                text = f"{who} joins as incarnation {node.incarnation}"
            case "generation_proposed":
                text = f"{who} creates generation {event.fields['number']}: {event.fields['reason']}"
            case "generation_started" if node.generation is not None and node.generation.number not in begun:
                begun.add(node.generation.number)
                text, mark = _generation(node.generation), "="
            case "phase_finished" if place_of(node) not in passed:
                place = place_of(node)
                passed.add(place)
                text, mark = f"passed: iteration {place[1]}, {_row(place[2])}", "="
            case "work_failed":
                text = f"{who} fails in {_row(place_of(node)[2])}: {event.fields.get('error', '')}"
            case "node_suspected":
                text = f"{who} suspects node {event.fields['suspect']}"
            case "node_recovered":
                text = f"{who} hears node {event.fields['suspect']} again"
            case "node_lost":
                each = "; ".join(f"node {lost['node_rank']}: {lost['why']}" for lost in event.fields["lost"])
                text = f"{who} has lost {each}{' (and waits for it)' if event.fields.get('waiting') else ''}"
            case "generation_sealed":
                iteration, phase = event.fields["goes_on_at"]
                number = event.fields["number"]
                text = f"{who} seals generation {number}; the run goes on at iteration {iteration}, {_row(phase)}"
            case "left_generation":
                text = f"{who} is not in generation {event.fields['newest']}; it joins again"
        yield Said(event.time, mark, text)


def _generation(generation: Generation) -> str:
    start, nodes = generation.start, ", ".join(str(rank) for rank in generation.ranks)
    head = f"generation {generation.number}: nodes {nodes}; leader {generation.leader}"
    return f"{head}; goes on at iteration {start.iteration}, {_row(start.phase)}"


def _row(phase: int) -> str:
    return f"{phase:02d} {PHASE_NAMES[phase]}"


def _rendered(line: Said) -> str:
    first, *rest = line.text.splitlines()
    text = first if len(first) <= WIDTH else first[: WIDTH - 3] + "..."
    more = "".join(f"{'':12}{line.strip()}\n" for line in rest)
    return f"{line.time:9.2f} {line.mark} {text}\n{more}"
