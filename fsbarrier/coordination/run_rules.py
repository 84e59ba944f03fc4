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
    """The rules for a program and the settings that the run began with. `accelerators`: of each node; a range may number them."""
    coordination = settings.coordination
    return Rules(
        table=program,
        num_nodes=settings.num_nodes,
        slice=settings.rl_phase,
        min_nodes=settings.min_nodes,
        roles_of=partial(roles, accelerators),
        on_node_failure=settings.on_node_failure,
        limits=Limits(
            suspect_s=coordination.suspect_s,
            dead_s=coordination.dead_s,
            stagger_s=2 * coordination.beat_s,
            last_call_s=coordination.last_call_s,
        ),
        settings={name: value for name, value in settings.flat().items() if changes_of(name) is EACH_SESSION},
    )


def roles(accelerators: int, settings: Payload) -> dict[str, frozenset[int]]:
    """The ranks that can hold each role that not all nodes have (`placement.*`)."""
    placed = {f"placement.{role}": settings[f"placement.{role}"] for role in ROLES}
    ranges = {f"{name}={text}": Ranges.parse(text) for name, text in placed.items()}
    nodes = range(settings["num_nodes"])
    return {
        what: frozenset(one.holders(nodes, accelerators))
        for what, one in ranges.items()
        if not one.everything
    }
