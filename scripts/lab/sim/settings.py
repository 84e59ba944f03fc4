"""Settings that change from session to session: random command lines, and the invariant of their effect (I16)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from fsbarrier.protocol.facts import Generation, Join, Payload
from fsbarrier.protocol.situation import MASTER
from fsbarrier.protocol.succession import STARTS
from fsbarrier.rundir import session_settings
from fsbarrier.settings.sections import PlacementSettings, Settings
from sim.history import History
from sim.setup import CHANGED, FIRST_LR

#: what no start of node 0 asks for
OTHERS: tuple[Payload, ...] = ({"tracker.names": ["tensorboard"]}, {"rollout.take_over": False})
_valid: dict[str, bool] = {}


def can_hold(settings: Settings, record: Join | Generation) -> bool:
    """Whether a record's settings are valid, as the daemon checks it. Remembered for all schedules, since a check takes milliseconds."""
    values = record.stated if isinstance(record, Join) else record.settings
    key = repr((settings.num_nodes, settings.rl_phase, record.choices, values))
    if key not in _valid:
        _valid[key] = session_settings.can_hold(settings, record)
    return _valid[key]


class CommandLines:
    """The settings on command lines. Every second later start of node 0 names another value; sometimes another node's start names one,
    right or wrong. Where others are at work, such a start is refused."""

    def __init__(self, seed: int | None, history: History, settings: Settings) -> None:
        """`seed` None: no command line names a setting."""
        self._dice = Random(f"settings {seed}") if seed is not None else None
        self._history, self._settings = history, settings
        self._typed = [FIRST_LR]

    def of(self, rank: int, *, again: bool) -> Payload:
        """The settings of a node's next start."""
        dice = self._dice
        if dice is None or not again or dice.random() >= (0.5 if rank == MASTER else 0.1):
            return {}
        self._history.faults.add("settings")
        if rank != MASTER:
            typed = dice.choice(self._typed)
            return dice.choice(({CHANGED: typed}, {CHANGED: typed}, *OTHERS))
        if dice.random() < 0.3 and self._settings.placement == PlacementSettings():
            # Otherwise a range may name a node that the smaller run does not have, which no start accepts.
            return self._other_size(dice)
        self._typed.append(float(len(self._typed)))
        return {CHANGED: self._typed[-1]}

    def _other_size(self, dice: Random) -> Payload:
        """A run with one node less, or with all that it began with. The last node ends then, or may come again."""
        most = self._settings.num_nodes
        size = max(self._settings.min_nodes, dice.choice((most - 1, most - 1, most)), 1)
        return {"num_nodes": size, "rank_weights": [1.0] * size}


def i16_the_same_settings(history: History) -> Iterator[str]:
    """All generations of a session have the same settings: those of the session before, and those that its start of node 0 asks for.
    No member contradicts them."""
    before: Generation | None = None
    for number, (_, record) in sorted(history.generations.items()):
        known = before.settings if before is not None else {}
        if record.reason not in STARTS and record.settings != known:
            yield f"generation {number} has not the settings of the one before it"
        if record.verdict is None:
            yield from _contradictions(history, record, known)
        before = record


def _contradictions(history: History, record: Generation, known: Payload) -> Iterator[str]:
    now = {**history.settings, **record.settings}
    stated: dict[int, Payload] = {}
    for member in record.members:
        join = history.joins[member.rank, member.incarnation].record
        assert isinstance(join, Join)
        stated[member.rank] = join.stated
        if any(now[name] != value for name, value in join.stated.items()):
            yield f"generation {record.number} takes in node {member.rank}, which asks for {dict(join.stated)}, and has {dict(now)}"
    if now not in ({**history.settings, **known}, {**history.settings, **known, **stated.get(MASTER, {})}):
        yield f"generation {record.number} has {dict(record.settings)}, for which no start of node 0 asked"
