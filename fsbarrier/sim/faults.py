"""The faults of a schedule, drawn from its seed: which ones, where they strike, and how a struck operation ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from fsbarrier.errors import UsageError
from fsbarrier.sim.store import Failure, GarbledRead, Habits, MountClient

#: name -> description, for `fsbarrier simulate --help`
KINDS = {
    "stale": "listings, contents and absences are remembered by each host for up to seconds; equal modification times hide changes",
    "lost": "an operation is done, and an error returned",
    "errors": "an operation fails once with ESTALE, EIO or ENOSPC",
    "garbled": "a read gives part of a new content and part of an old one",
    "handles": "a host cannot read a file that is there (ESTALE), for a moment or for up to 40 s",
    "shared": "several nodes use one mount, and so share its caches",
    "outage": "every operation of a node fails for a while (EIO), or every write (ENOSPC)",
    "slow": "an operation of a node, or the end of its work, hangs for a while, and soon its heartbeats stop",
    "crash": "a node's processes are killed, also between two operations; it is started again, or not",
    "power": "a host, or all of them at once, loses power: what was not flushed may be lost or torn",
    "old": "for up to a minute a host's mount shows nothing that is newer; its node is started again there, or not",
    "pause": "a node is stopped (SIGSTOP, or its whole host) and wakes up later, maybe after it was given up",
    "leave": "a node is ended by a signal",
    "twin": "a node is started a second time elsewhere while the first one lives",
    "program": "a phase's program fails",
    "stop": "an operator asks the run to end, at the next safe point or at once",
    "unreadable": "records are damaged, or of a foreign format, or one host can read no generation's, until that is mended",
    "version": "a node is started again with other code than the others'",
    "junk": "files that are not ours, and torn ones, lie in every directory of the protocol",
    "winners": "an exclusive create that two clients win: the class that must be refused (only on demand)",
}
USUAL = frozenset(KINDS) - {"winners"}
# what programs say when they fail
FAILURES = ("the program ended with exit code 1", "out of memory", "cannot read the batch")
# the limit of operations in one look; more are a livelock
LIVELOCK = 5000
PAUSES_S = (0.3, 2.0, 4.0, 5.0, 8.0, 13.0, 16.0, 18.0, 22.0, 30.0, 45.0)
STRIKES = (
    "crash",
    "crash",
    "pause",
    "pause",
    "slow",
    "power",
    "outage",
    "leave",
    "twin",
    "stop",
    "unreadable",
    "version",
)
_ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE)


class Crash(BaseException):
    """The process is killed in this operation."""


class Livelock(Exception):
    """A node performed thousands of operations in one look."""


def parse_mix(text: str) -> frozenset[str]:
    """Parse `all`, `none`, or names of KINDS separated by commas. Raises UsageError."""
    if text in ("all", "none"):
        return USUAL if text == "all" else frozenset()
    names = frozenset(name.strip() for name in text.split(","))
    unknown = sorted(names - KINDS.keys())
    if unknown:
        raise UsageError(
            f"--faults {text}: unknown {', '.join(unknown)}; there are all, none, {', '.join(KINDS)}"
        )
    return names


@dataclass(frozen=True, slots=True)
class Strike:
    """A planned fault. It is due at `time`, or `delay` after node `rank` first enters (`iteration`, `phase`), if given.

    `rank` None: all nodes. `step`: strike in the `step`-th operation of a look; 0: between two operations.
    """

    kind: str
    rank: int | None
    time: float
    iteration: int = 0
    phase: int = 0
    delay: float = 0.0
    seconds: float = 0.0
    step: int = 0
    # the whole host, or only the daemon
    whole: bool = False


class StrikeOnEntry(NamedTuple):
    """A strike `delay` after node `rank` (None: any) first enters a row."""

    rank: int | None
    iteration: int
    phase: int
    delay: float
    action: Callable[[], None]


def draw_strikes(rng: Random, mix: Collection[str], nodes: int, iterations: int) -> list[Strike]:
    """Zero to five faults, half of them in a chosen phase of a node."""
    kinds = [kind for kind in STRIKES if kind in mix]
    if not kinds:
        return []
    strikes = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 5))):
        kind = rng.choice(kinds)
        if kind == "stop" and rng.random() < 0.7:
            continue
        everybody = kind == "power" and rng.random() < 0.5
        there = rng.random() < 0.6
        strikes.append(
            Strike(
                kind,
                None if everybody else rng.randrange(nodes),
                rng.uniform(0.0, 15.0 * iterations),
                iteration=rng.randint(1, iterations) if there else 0,
                phase=rng.randint(0, 13),
                delay=rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 2.0))),
                seconds=rng.choice(PAUSES_S),
                step=rng.randint(1, 14) if kind in ("crash", "pause", "slow") and rng.random() < 0.5 else 0,
                whole=rng.random() < 0.5,
            )
        )
    return strikes


def draw_habits(rng: Random, mix: Collection[str]) -> tuple[Habits, float]:
    """How stale the mounts of a schedule are, and how coarse its directories' modification times."""
    if "stale" not in mix or rng.random() < 0.4:
        return Habits(), 0.0
    habits = Habits(
        listing_s=rng.choice((0.0, 0.5, 1.0, 3.0)),
        content_s=rng.choice((0.0, 0.5, 1.0, 2.0)),
        absence_s=rng.choice((0.0, 3.0, 30.0)),
        listing_frees=rng.random() < 0.7,
    )
    return habits, rng.choice((0.0, 0.0, 0.01, 1.0))


def draw_old_view(seed: int, mix: Collection[str], nodes: int, iterations: int) -> list[Strike]:
    """Sometimes a mount that shows nothing newer, for longer than `dead_s`."""
    dice = Random(f"old {seed}")
    if "old" not in mix or dice.random() >= 1 / len(mix):
        return []
    place = 1, dice.choice((1, 2, 4, 6, 10))
    rank, seconds = dice.randrange(nodes), dice.choice((25.0, 40.0, 60.0))
    return [Strike("old", rank, 0.0, *place, delay=dice.uniform(0, 2.0), seconds=seconds)]


class StaleHandles:
    """Makes files unreadable on one host for a while (ESTALE). Each read asks it; it has its own random generator.

    The record is then not readable yet (record_store.OF_ONE_RECORD), even if this host has read it before.
    """

    def __init__(self, seed: int, mix: Collection[str], struck: set[str]) -> None:
        self._rng, self._struck = Random(f"handles {seed}"), struck
        self._until: dict[tuple[str, str], float] = {}
        self.rate = self._rng.choice((0.0, 0.0, 0.001, 0.01)) if "handles" in mix else 0.0

    def __call__(self, host: str, path: str, now: float) -> bool:
        if self._rng.random() < self.rate:
            self._until[host, path] = now + self._rng.choice((0.3, 1.0, 3.0, 8.0, 8.0, 40.0))
            self._struck.add("handles")
        return self._until.get((host, path), 0.0) > now


class Garbling:
    """Garbles reads repeatedly. Each read asks it; it has its own random generator.

    A read is garbled because it races with a replacement, so the host's next read of that file is whole again.
    """

    def __init__(self, seed: int, mix: Collection[str], struck: set[str]) -> None:
        self._rng, self._struck = Random(f"garbled {seed}"), struck
        self._last: set[tuple[str, str]] = set()
        self.rate = self._rng.choice((0.0, 0.0, 0.02, 0.2)) if "garbled" in mix else 0.0

    def __call__(self, host: str, path: str) -> bool:
        if self._rng.random() < self.rate and (host, path) not in self._last:
            self._last.add((host, path))
            self._struck.add("garbled")
            return True
        if self._last:
            self._last.discard((host, path))
        return False


@dataclass(slots=True)
class Mishap:
    """A mishap in the `step`-th operation from now on: `how` is lost, error, garbled, crash, crash-after or block."""

    how: str
    step: int
    code: int = errno.EIO
    seconds: float = 0.0
    # strike only at this kind of operation, and at a path that contains this
    verb: str = ""
    inside: str = ""
    # the whole process is stopped while blocked
    stopped: bool = False


def draw_mishap(rng: Random, mix: Collection[str], rate: float) -> Mishap | None:
    """A mishap in one of the next operations."""
    if rng.random() >= rate:
        return None
    hows = [
        how for how, kind in (("lost", "lost"), ("error", "errors"), ("garbled", "garbled")) if kind in mix
    ]
    return Mishap(rng.choice(hows), rng.randint(1, 10), rng.choice(_ERRORS)) if hows else None


def draw_mishap_of_a_start(dice: Random, mix: Collection[str], rate: float) -> Mishap | None:
    """A mishap in the create of a join record, the operation whose error may be ambiguous."""
    kinds = [how for how, kind in (("lost", "lost"), ("error", "errors")) if kind in mix]
    if not kinds or dice.random() >= rate:
        return None
    return Mishap(dice.choice(kinds), 1, dice.choice(_ERRORS), verb="create", inside="/joins/")


class Trouble:
    """Stands between a MountClient and its disk, and makes the planned mishaps happen.

    `block(seconds, stopped)` makes the calling process wait in the middle of its operation.
    """

    def __init__(self, client: MountClient, block: Callable[[float, bool], None]) -> None:
        self.client, self._block = client, block
        # the errno of all operations in an outage; None: no outage
        self.outage: int | None = None
        self._mishap: Mishap | None = None
        client.alarm = self._alarm
        self._expect(LIVELOCK)

    def begin(self, mishap: Mishap) -> None:
        """A look begins; `mishap` strikes in it."""
        self._mishap = mishap
        self._expect(mishap.step)

    def cancelling(self) -> None:
        """Work is being cancelled, which may block."""
        if self._mishap is not None and self._mishap.verb == "cancel":
            self._alarm("cancel", "")

    def rest(self) -> Mishap | None:
        """The look is over; returns the mishap if it did not happen."""
        left, self._mishap = self._mishap, None
        if left is not None:
            left.step = max(1, self.client.alarm_at - self.client.done)
        self._expect(LIVELOCK)
        return left

    def set_outage(self, code: int | None) -> None:
        self.outage = code
        self.rest()

    def _expect(self, step: int) -> None:
        """Make the client call `_alarm` at the `step`-th operation from now on; in an outage at each."""
        self.client.done, self.client.alarm_at = 0, step if self.outage is None else 1

    def _alarm(self, verb: str, path: str) -> Failure | None:
        if self.outage is not None:
            if self.outage == errno.ENOSPC and verb in ("read", "names"):
                return None
            raise OSError(self.outage, os.strerror(self.outage), path)
        waiting = self._mishap
        if waiting is not None and (waiting.verb not in ("", verb) or waiting.inside not in path):
            # Not the kind of operation that the mishap waits for: ask again at the next one.
            return None
        mishap, self._mishap = self._mishap, None
        self._expect(LIVELOCK)
        if mishap is None:
            raise Livelock(f"{LIVELOCK} operations in one look; the last was {verb} {path}")
        if mishap.how == "block":
            self._block(mishap.seconds, mishap.stopped)
            return None
        if mishap.how == "crash":
            raise Crash
        if mishap.how == "crash-after":
            return Crash
        if mishap.how == "garbled":
            return GarbledRead if verb == "read" else None
        failure = partial(OSError, mishap.code, os.strerror(mishap.code), path)
        if mishap.how == "lost":
            return failure
        raise failure()
