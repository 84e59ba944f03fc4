"""Derives the state machine's rules and a node's poll intervals from a run's settings."""

from __future__ import annotations

from functools import partial

from fsbarrier.coordination.poll_intervals import PollIntervals, join_factor, size_factor
from fsbarrier.program import Program
from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Role, Rules
from fsbarrier.settings.placement import ROLES, Ranges
from fsbarrier.settings.section import EACH_SESSION
from fsbarrier.settings.sections import Settings, changes_of


def make_rules(settings: Settings, program: Program, accelerators: int) -> Rules:
    """The rules for a program and the settings that the run began with. `accelerators`: how many each node has, since a placement may
    number them."""
    coordination = settings.coordination
    return Rules(
        table=program,
        num_nodes=settings.num_nodes,
        slice=settings.rl_phase,
        min_nodes=settings.min_nodes,
        roles_of=partial(roles, accelerators, settings),
        on_node_failure=settings.on_node_failure,
        limits=Limits(
            suspect_s=coordination.suspect_s,
            dead_s=coordination.dead_s,
            stagger_s=2 * coordination.beat_s,
            last_call_s=coordination.last_call_s,
        ),
        settings={name: value for name, value in settings.flat().items() if changes_of(name) is EACH_SESSION},
    )


def roles(accelerators: int, began: Settings, current: Payload) -> list[Role]:
    """The roles that not all nodes have (`placement.*`), or that several must hold together (`engine.nodes`). `began`: the settings that
    the run began with. `current`: the present values of the settings that may change."""
    placed = {f"placement.{role}": current[f"placement.{role}"] for role in ROLES}
    placed |= {
        f"placement.{name}": engine.placement for name, engine in began.engines.items() if engine.placement
    }
    nodes, limited = range(current["num_nodes"]), []
    for name, text in placed.items():
        ranges, spans = Ranges.parse(text), began.engine.nodes if name == "placement.rollout" else 1
        if spans > 1 or not ranges.everything:
            holders = frozenset(ranges.holders(nodes, accelerators))
            asked = f" for engine.nodes={spans}" if spans > 1 else ""
            limited.append(Role(name, holders, spans, f"={text}{asked}"))
    return limited


def poll_intervals(settings: Settings) -> PollIntervals:
    """The pauses that follow from the run's settings."""
    coordination = settings.coordination
    # The journal names a killed daemon within this time. The nodes of a large run look less often, to spare the metadata server.
    beats_s = coordination.beat_s * min(1.0, 0.7 * size_factor(settings.num_nodes))
    return PollIntervals(
        members_s=0.1 * size_factor(settings.num_nodes),
        # Well below half of `suspect_s`, after which a node stops its own heartbeats because its loop seems to hang.
        beats_s=min(beats_s, coordination.suspect_s / 3),
        poll_gap_s=1.5 * coordination.beat_s,
        dead_s=coordination.dead_s,
        join_factor=join_factor(settings.num_nodes),
        outage_s=coordination.outage_s,
    )
