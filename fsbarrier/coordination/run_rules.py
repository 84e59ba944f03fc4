"""The state machine's rules for one run."""

from __future__ import annotations

from fsbarrier.program import Program
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Rules
from fsbarrier.settings.section import EACH_SESSION
from fsbarrier.settings.sections import Settings, changes_of


def make_rules(settings: Settings, program: Program) -> Rules:
    """The rules for a program and the settings that the run began with."""
    coordination = settings.coordination
    return Rules(
        table=program,
        num_nodes=settings.num_nodes,
        slice=settings.rl_phase,
        min_nodes=settings.min_nodes,
        on_node_failure=settings.on_node_failure,
        limits=Limits(
            suspect_s=coordination.suspect_s,
            dead_s=coordination.dead_s,
            stagger_s=2 * coordination.beat_s,
            last_call_s=coordination.last_call_s,
        ),
        settings={name: value for name, value in settings.flat().items() if changes_of(name) is EACH_SESSION},
    )
