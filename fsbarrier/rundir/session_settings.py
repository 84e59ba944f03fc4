"""Combines the settings of run.json with the changes that a session's generations record (docs/protocol.md, "Settings that
change"), and compares what a start asks for with them: finds what it may change, and refuses contradictions.

Only settings that may change are taken from a generation's record, so that a forged record cannot name a program. Names that this version
does not know are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Generation, Join, Payload
from fsbarrier.rundir.names import GENERATION
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore
from fsbarrier.rundir.runrecord import RunRecord, shown_path
from fsbarrier.settings.section import EACH_SESSION, EACH_START
from fsbarrier.settings.sections import Settings, changes_of
from fsbarrier.settings.sources import SETS, TRAIN_SETS, ChosenValue, name_in, table_of
from fsbarrier.wording import setting_text


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


def stated_changes(
    record: RunRecord, chosen: Mapping[str, ChosenValue], settings: Settings
) -> dict[str, object]:
    """The changeable settings in `chosen`, by dotted names, as JSON values.

    `settings`: the parsed `chosen`, so that equal values agree however they are written. Raises UsageError, with both values, for
    the first unchangeable setting that contradicts the record.
    """
    ours, theirs, changes = settings.flat(), record.settings.flat(), {}
    sets_of = {SETS: record.settings.eval.sets, TRAIN_SETS: record.settings.train.sets}
    for key, chosen_value in chosen.items():
        kind, value, recorded = changes_of(key), ours.get(key), theirs.get(key)
        table = table_of(key)
        own_set, sets = name_in(key), sets_of.get(table or "")
        if sets is not None and own_set not in sets:
            existing = f"its {table} are {', '.join(sorted(sets))}" if sets else f"its {table} are empty"
            raise UsageError(
                f"{chosen_value.written(setting_text(value))}: this run has no set {own_set} ({existing}), and sets cannot be added; "
                f"drop it or begin another run from this one's policy (init_from={shown_path(record.log_path)})"
            )
        if sets is not None and key == f"{table}.{own_set}":
            # A table without values only names an existing set, so it changes nothing.
            continue
        if kind is EACH_SESSION:
            changes[key] = value
        elif kind is not EACH_START and value != recorded:
            raise UsageError(
                f"{chosen_value.written(setting_text(value))} contradicts this run's record ({setting_text(recorded)}, from "
                f"{record.origin}), and it is fixed for the life of a run; drop {'the flag' if chosen_value.is_flag else 'it'} "
                "or use another --log-path"
            )
    return changes
