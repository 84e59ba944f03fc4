"""Settings that starts change: random command lines, and the invariant of their effect (I16)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from fsbarrier.protocol.facts import Generation, Join, Payload, Revision
from fsbarrier.protocol.revisions import MASTER, in_force
from fsbarrier.rundir import revisions
from fsbarrier.settings.sections import Settings
from fsbarrier.sim.history import History
from fsbarrier.sim.setup import CHANGED, FIRST_LR

#: what no start of node 0 asks for
OTHERS: tuple[Payload, ...] = ({"tracker.names": ["tensorboard"]}, {"rollout.take_over": False})
_valid: dict[str, bool] = {}


def can_hold(settings: Settings, record: Join | Generation) -> bool:
    """Whether a record's settings are valid, as the daemon checks it. Remembered for all schedules, since a check takes milliseconds."""
    values = record.stated if isinstance(record, Join) else [revision.values for revision in record.revisions]
    key = repr((settings.num_nodes, settings.rl_phase, record.choices, values))
    if key not in _valid:
        _valid[key] = revisions.can_hold(settings, record)
    return _valid[key]


class CommandLines:
    """The settings on command lines. Every second later start of node 0 changes one; sometimes another node's start names a value,
    right or wrong."""

    def __init__(self, seed: int, history: History, settings: Settings) -> None:
        self._dice, self._history, self._settings = Random(f"settings {seed}"), history, settings
        self._typed = [FIRST_LR]

    def of(self, rank: int, *, again: bool) -> Payload:
        """The settings of a node's next start."""
        if not again:
            return {}
        if rank == MASTER and self._dice.random() < 0.5:
            if self._dice.random() < 0.3:
                return self._other_size()
            self._typed.append(float(len(self._typed)))
            return {CHANGED: self._typed[-1]}
        if rank != MASTER and self._dice.random() < 0.1:
            self._history.faults.add("settings")
            typed = self._dice.choice(self._typed)
            return self._dice.choice(({CHANGED: typed}, {CHANGED: typed}, *OTHERS))
        return {}

    def _other_size(self) -> Payload:
        """A run with one node less, or with all that it began with. The last node ends then, or may come again."""
        self._history.faults.add("settings")
        most = self._settings.num_nodes
        size = max(self._settings.min_nodes, self._dice.choice((most - 1, most - 1, most)), 1)
        return {"num_nodes": size, "rank_weights": [1.0] * size}


def i16_the_same_settings(history: History) -> Iterator[str]:
    """A generation has the settings of the one before, and those of a start of node 0 that it admits. An iteration that has begun keeps
    its settings. No other admitted start contradicts the settings."""
    before: Generation | None = None
    for number, (_, record) in sorted(history.generations.items()):
        if number not in history.recovered:
            known = before.revisions if before is not None else ()
            if record.revisions[: len(known)] != known or len(record.revisions) > len(known) + 1:
                yield f"generation {number} has not the settings of the one before it"
            if record.verdict is None:
                yield from _changes(history, record, before, record.revisions[len(known) :])
        before = record


def _changes(
    history: History, record: Generation, before: Generation | None, new: tuple[Revision, ...]
) -> Iterator[str]:
    now = in_force(history.settings, record.revisions)
    asked: dict[int, Join] = {}
    for member in record.members:
        join = history.joins[member.rank, member.incarnation].record
        if isinstance(join, Join) and (
            before is None or before.incarnation_of(member.rank) != join.incarnation
        ):
            asked[member.rank] = join
    for rank, join in asked.items():
        if any(now[name] != value for name, value in join.stated.items()):
            yield f"generation {record.number} takes in node {rank}, which asks for {dict(join.stated)}, and has {dict(now)}"
    for revision in new:
        begun = record.start.phase > history.span(record)[0]
        if MASTER not in asked or dict(revision.values) != dict(asked[MASTER].stated):
            yield f"generation {record.number} has {dict(revision.values)}, for which no start of node 0 asked"
        if revision.iteration != record.start.iteration + begun:
            yield f"generation {record.number} changes iteration {revision.iteration}, and starts at {record.start}"
