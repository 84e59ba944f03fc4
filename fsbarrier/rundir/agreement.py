"""Compares the settings that a start asks for with the run's record: finds those that it may change, and refuses contradictions."""

from __future__ import annotations

from collections.abc import Mapping

from fsbarrier.errors import UsageError
from fsbarrier.protocol.session import shown
from fsbarrier.rundir.runrecord import RunRecord, shown_path
from fsbarrier.settings.section import EACH_SESSION, EACH_START
from fsbarrier.settings.sections import Settings, changes_of
from fsbarrier.settings.sources import SETS, TRAIN_SETS, ChosenValue, name_in, table_of


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
                f"{chosen_value.written(shown(value))}: this run has no set {own_set} ({existing}), and sets cannot be added; "
                f"drop it or begin another run from this one's policy (init_from={shown_path(record.log_path)})"
            )
        if sets is not None and key == f"{table}.{own_set}":
            # A table without values only names an existing set, so it changes nothing.
            continue
        if kind is EACH_SESSION:
            changes[key] = value
        elif kind is not EACH_START and value != recorded:
            raise UsageError(
                f"{chosen_value.written(shown(value))} contradicts this run's record ({shown(recorded)}, from {record.origin}), "
                f"and it is fixed for the life of a run; drop {'the flag' if chosen_value.is_flag else 'it'} or use another --log-path"
            )
    return changes
