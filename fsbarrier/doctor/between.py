"""What several nodes measure at once in one folder: how late each sees the others' changes, and who wins exclusive creates.

Every node replaces its own file and renames its own name, again and again, and both say up to which number it has seen those of the
others. So each change makes a round trip on one clock; its half is the delay. `measure` and `race` do not use the group; the callers put a
barrier between them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fsbarrier.doctor.findings import Check, Times
from fsbarrier.store import files
from fsbarrier.store.reading import RECORD_BYTES, read_bytes

#: how long to measure, at most if changes do not become visible, and the pause between two looks
MEASURE_S, LONGEST_S, PAUSE_S = 4.0, 25.0, 0.005
ROUNDS = 100
#: the filler makes replaced files longer than a page, and of different lengths, so that a mixture of two is detected
FILLER = 5000
NAME = re.compile(r"name-(\d+)\.(\d+)\.([\d-]+)")


@dataclass(frozen=True, slots=True)
class About:
    """A description of a node. `fresher`: mount options that reduce delays."""

    host: str
    boot_id: str
    versions: Mapping[str, str]
    accelerators: str
    mount: str
    fresher: str


@dataclass(slots=True)
class Races:
    """One node's part in the races: the rounds it won, its errors by name, the record of each name, and whether there are hard links."""

    won: list[int] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    records: list[str] = field(default_factory=list)
    links: bool = True

    def read(self, session: Path) -> None:
        """Read who won each name; "" where that cannot be read."""
        for number in range(ROUNDS):
            content = b""
            with contextlib.suppress(OSError):
                content = files.read_created(_raced(session, number))
            self.records.append(content.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Measured:
    """`lags`: half round trips by kind ("content", "listing"); `clock_leads`: by node, how far its clock is ahead, and how exactly that is
    known; the rest: what reads of replaced files gave."""

    lags: Mapping[str, Times]
    clock_leads: Mapping[str, tuple[float, float]]
    reads: int
    torn: int
    backwards: int


@dataclass(frozen=True, slots=True)
class NodeFindings:
    """The findings of one node. `reached`: the addresses at which each other node answers."""

    about: About
    checks: Sequence[Check]
    races: Races
    measured: Measured
    reached: Mapping[str, Sequence[str]]

    @staticmethod
    def of(message: Mapping[str, Any]) -> NodeFindings:
        """Rebuild from the JSON of `asdict`."""
        return msgspec.convert(message, NodeFindings)


#: findings by rank
Findings = Mapping[int, NodeFindings]


class _Channel:
    """One way to see the others: what each was last seen to say, and the round trips."""

    def __init__(self, others: Sequence[int]) -> None:
        self.heard = dict.fromkeys(others, 0)
        #: by other node: up to which of our numbers it has answered
        self.answered = dict.fromkeys(others, 0)
        self.seconds: list[float] = []

    def saw(self, rank: int, number: int, answer: int, sent: Sequence[float]) -> float:
        """Take in what a node says. Returns the seconds of a new round trip; 0.0: there is none."""
        self.heard[rank] = max(self.heard[rank], number)
        if not self.answered[rank] < answer < len(sent):
            return 0.0
        trip = time.monotonic() - sent[self.answered[rank] + 1]
        self.answered[rank] = answer
        self.seconds.append(trip / 2)
        return trip

    def waiting_s(self, sent: Sequence[float]) -> float:
        """How long the longest unanswered change has been waiting."""
        first = min(self.answered.values()) + 1
        return time.monotonic() - sent[first] if first < len(sent) else 0.0

    def times(self, sent: Sequence[float]) -> Times | None:
        waiting_s = self.waiting_s(sent) / 2
        return Times.of(self.seconds, waiting_s if waiting_s > max(self.seconds, default=0.0) else 0.0)


class _Watch:
    """One node's part in `measure`."""

    def __init__(self, folder: Path, rank: int, members: Sequence[int]) -> None:
        self.folder, self.rank, self.members = folder, rank, members
        self.others = [each for each in members if each != rank]
        self.content, self.listing = _Channel(self.others), _Channel(self.others)
        #: when each of our numbers was written; they begin with 1
        self.sent = [0.0]
        self.leads: dict[str, tuple[float, float]] = {}
        self.reads = self.torn = self.backwards = 0
        self.finished: set[int] = set()
        self._name: Path | None = None

    def tell(self, *, done: bool) -> None:
        """Write the next number, in both ways. Raises OSError."""
        number = len(self.sent)
        self.sent.append(time.monotonic())
        body = {"number": number, "heard": self.content.heard, "time": time.time(), "done": done}
        filler = str(number % 10) * (FILLER + number % 7)
        files.write_atomic(self.folder / f"content-{self.rank}", json.dumps([body, filler]).encode())
        answers = "-".join(str(self.listing.heard.get(each, 0)) for each in self.members)
        name = self.folder / f"name-{self.rank}.{number}.{answers}"
        if self._name is None:
            os.close(files.open_new(name))
        else:
            os.rename(self._name, name)
        self._name = name

    def look(self) -> None:
        for rank in self.others:
            self._read(rank)
        mine = self.members.index(self.rank)
        for name in os.listdir(self.folder):
            match = NAME.fullmatch(name)
            if match and (rank := int(match[1])) in self.listing.heard:
                answers = match[3].split("-")
                self.listing.saw(rank, int(match[2]), int(answers[mine]), self.sent)

    def _read(self, rank: int) -> None:
        try:
            data = read_bytes(self.folder / f"content-{rank}", RECORD_BYTES)
        except OSError:
            # Not there yet; afterwards a rename never lets it be missing for long.
            return
        self.reads += 1
        try:
            body, filler = json.loads(data)
            whole = filler == str(body["number"] % 10) * (FILLER + body["number"] % 7)
        except (ValueError, TypeError, KeyError):
            whole = False
        if not whole:
            self.torn += 1
            return
        self.backwards += body["number"] < self.content.heard[rank]
        if body["done"]:
            self.finished.add(rank)
        trip = self.content.saw(rank, body["number"], body["heard"][str(self.rank)], self.sent)
        known = self.leads.get(str(rank))
        if trip and (known is None or trip / 2 < known[1]):
            self.leads[str(rank)] = (body["time"] - (time.time() - trip / 2), trip / 2)

    def measured(self) -> Measured:
        found = {"content": self.content.times(self.sent), "listing": self.listing.times(self.sent)}
        lags = {kind: times for kind, times in found.items() if times is not None}
        return Measured(lags, self.leads, self.reads, self.torn, self.backwards)


def measure(session: Path, rank: int, members: Sequence[int]) -> Measured:
    """Write and look until all nodes have measured enough, or changes do not become visible for LONGEST_S. Raises OSError."""
    folder = session / "changes"
    files.make_dirs(folder)
    watch, begin, done = _Watch(folder, rank, members), time.monotonic(), False
    result = watch.measured()
    try:
        while (elapsed := time.monotonic() - begin) < LONGEST_S + MEASURE_S:
            watch.tell(done=done)
            watch.look()
            everyone = min(*watch.content.answered.values(), *watch.listing.answered.values())
            if not done and ((elapsed > MEASURE_S and everyone > 0) or elapsed > LONGEST_S):
                done, result = True, watch.measured()
            if done and len(watch.finished) == len(watch.others):
                break
            threading.Event().wait(PAUSE_S)
    finally:
        # For those who have not read yet that this node is done, and so that nobody waits for one that is interrupted.
        with contextlib.suppress(OSError):
            watch.tell(done=True)
    return result


def _raced(session: Path, number: int) -> Path:
    return session / "races" / f"{number:03d}"


def race(session: Path, rank: int) -> Races:
    """Create names as the protocol does, each after the newest that this node knows, so that all nodes try the same at the same time."""
    folder, mine = session / "races", f"node-{rank}".encode()
    files.make_dirs(folder)
    result = Races(links=_has_links(folder, rank))
    number, end = 0, time.monotonic() + LONGEST_S
    while number < ROUNDS and time.monotonic() < end:
        try:
            if files.create_exclusive(_raced(session, number), mine, durable=False, never_torn=True):
                result.won.append(number)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "unknown")
            result.errors[name] = result.errors.get(name, 0) + 1
        newest = max((int(name) for name in os.listdir(folder) if name.isdigit()), default=0)
        # Not always the frontier: a name that was decided long ago must have one winner too.
        number = max(number + 1, newest if number % 4 else 0)
    return result


def _has_links(folder: Path, rank: int) -> bool:
    own = folder / f".{rank}"
    files.write_atomic(own, b"")
    try:
        os.link(own, folder / f".{rank}.link")
    except OSError:
        return False
    return True
