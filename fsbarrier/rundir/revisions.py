"""The settings of a run after the changes in its generations (see protocol/revisions.py).

Only settings that may change are taken from a generation's record, so that a forged record cannot name a program. Names that this version
does not know are ignored.
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
    """A run's settings in one iteration. `settings`: those that it began with."""
    for revision in revisions:
        kinds = MAY_CHANGE if iteration >= revision.iteration else (AT_ONCE,)
        settings = _with_changes(settings, revision.values, kinds)
    return settings


def present(settings: Settings, revisions: Sequence[Revision]) -> Settings:
    """A run's settings after all changes, including those that take effect in a later iteration."""
    return _with_changes(settings, in_force({}, revisions), MAY_CHANGE)


def can_hold(settings: Settings, record: Join | Generation) -> bool:
    """Whether the settings in a record are valid for this run."""
    from fsbarrier.settings.resolve import checked

    values = record.stated if isinstance(record, Join) else in_force({}, record.revisions)
    try:
        checked(replace(_with_changes(settings, values, MAY_CHANGE), **record.choices))
    except (UsageError, TypeError):
        return False
    return True


def _with_changes(settings: Settings, values: Payload, kinds: Sequence[Changes]) -> Settings:
    if not values:
        return settings
    there = set(names_that_change(settings))
    chosen = {name: value for name, value in values.items() if name in there and changes_of(name) in kinds}
    return settings.with_values(chosen)


def newest_revisions(paths: RunPaths) -> tuple[Revision, ...]:
    """The revisions of the newest readable generation, for display and early errors. The protocol itself does not use them."""
    store = LenientStore()
    for number in sorted(GENERATION.parse_all(store.names(paths.generations)), reverse=True):
        record = store.read(paths.generation(number), Generation)
        if record is not None:
            return record.revisions
    return ()
