"""Combines the settings of run.json with the changes that a session's generations record (see protocol/session.py).

Only settings that may change are taken from a generation's record, so that a forged record cannot name a program. Names that this version
does not know are ignored.
"""

from __future__ import annotations

from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Generation, Join, Payload
from fsbarrier.rundir.names import GENERATION
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore
from fsbarrier.settings.section import EACH_SESSION
from fsbarrier.settings.sections import Settings, changes_of


def in_force(recorded: Settings, values: Payload) -> Settings:
    """The settings in a session. `recorded`: the settings of run.json; `values`: the changes that the session's generations record."""
    if not values:
        return recorded
    settings = recorded.flat()
    known = {name: value for name, value in values.items() if name in settings}
    return recorded.with_values(
        {name: value for name, value in known.items() if changes_of(name) is EACH_SESSION}
    )


def can_hold(recorded: Settings, record: Generation | Join) -> bool:
    """Whether the settings that a record asks for are valid for this run."""
    values = record.stated if isinstance(record, Join) else record.settings
    if record.choices.keys() - recorded.choices.keys():
        return False
    try:
        in_force(recorded, values).with_values(record.choices)
    except UsageError:
        return False
    return True


def newest_settings(paths: RunPaths) -> Payload:
    """The `settings` of the newest readable generation, for display and early errors. The protocol itself does not use them."""
    store = LenientStore()
    for number in sorted(GENERATION.parse_all(store.names(paths.generations)), reverse=True):
        record = store.read(paths.generation(number), Generation)
        if record is not None:
            return record.settings
    return {}
