"""The settings of a run as its generations have changed them (protocol/revisions.py decides when they do).

A generation's record is a file of the run directory like others: of what it says, only settings that may change are taken, so that it
cannot name a program. Names that this version does not know are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Generation, Join, Payload, Revision
from fsbarrier.protocol.revisions import in_force
from fsbarrier.rundir.names import GENERATION
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore
from fsbarrier.settings.section import AT_ONCE, NEXT_ITERATION, Changes
from fsbarrier.settings.sections import Settings, changes_of, names_that_change

MAY_CHANGE = (NEXT_ITERATION, AT_ONCE)


def settings_in(settings: Settings, revisions: Sequence[Revision], iteration: int) -> Settings:
    """A run's settings in one iteration; `settings`: as it began with them."""
    for revision in revisions:
        kinds = MAY_CHANGE if iteration >= revision.iteration else (AT_ONCE,)
        settings = _with(settings, revision.values, kinds)
    return settings


def present(settings: Settings, revisions: Sequence[Revision]) -> Settings:
    """A run's settings with every change, those that begin with a later iteration too."""
    return _with(settings, in_force({}, revisions), MAY_CHANGE)


def can_hold(settings: Settings, record: Join | Generation) -> bool:
    """Whether the values that a record asks for are such as somebody could have chosen at a start of this run."""
    from fsbarrier.settings.resolve import checked

    values = record.stated if isinstance(record, Join) else in_force({}, record.revisions)
    try:
        checked(replace(_with(settings, values, MAY_CHANGE), **record.choices))
    except (UsageError, TypeError):
        return False
    return True


def _with(settings: Settings, values: Payload, kinds: Sequence[Changes]) -> Settings:
    if not values:
        return settings
    there = set(names_that_change(settings))
    chosen = {name: value for name, value in values.items() if name in there and changes_of(name) in kinds}
    return settings.with_values(chosen)


def newest_revisions(paths: RunPaths) -> tuple[Revision, ...]:
    """As the newest generation that can be read now has them: to show them, and to refuse early. What holds, the generations decide."""
    store = LenientStore()
    for number in sorted(GENERATION.parse_all(store.names(paths.generations)), reverse=True):
        record = store.read(paths.generation(number), Generation)
        if record is not None:
            return record.revisions
    return ()
