"""The state machine's rules for one run."""

from __future__ import annotations

from functools import partial

from fsbarrier.program import Program
from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Rules
from fsbarrier.settings.placement import ROLES, Ranges
from fsbarrier.settings.section import EACH_SESSION
from fsbarrier.settings.sections import Settings, changes_of


def make_rules(settings: Settings, program: Program, accelerators: int = 0) -> Rules:
    """The rules for a program and the settings that the run began with. `accelerators`: how many each node has."""
    coordination = settings.coordination
    return Rules(
        table=program,
        num_nodes=settings.num_nodes,
        slice=settings.rl_phase,
        min_nodes=settings.min_nodes,
        roles=roles(settings, accelerators, {}),
        roles_of=partial(roles, settings, accelerators),
        on_node_failure=settings.on_node_failure,
        limits=Limits(
            suspect_s=coordination.suspect_s,
            dead_s=coordination.dead_s,
            stagger_s=2 * coordination.beat_s,
            last_call_s=coordination.last_call_s,
        ),
        settings={name: value for name, value in settings.flat().items() if changes_of(name) is EACH_SESSION},
    )


def roles(settings: Settings, accelerators: int, changed: Payload) -> dict[str, frozenset[int]]:
    """The ranks that can hold each role that not all nodes have (`placement.*`)."""
    nodes = range(int(changed.get("num_nodes", settings.num_nodes)))
    found = {}
    for role in ROLES:
        name = f"placement.{role}"
        text = str(changed.get(name, getattr(settings.placement, role)))
        ranges = Ranges.parse(text)
        if not ranges.everything:
            found[f"{name}={text}"] = frozenset(ranges.holders(nodes, accelerators))
    return found
