"""What several nodes measure at once in one folder: how late each sees the others' changes, and who wins exclusive creates.

Every node replaces its own file and renames its own name, again and again. The name says up to which number it has seen the names and the
files of the others, so each change makes a round trip on one clock. A file is replaced only after all have read it: where contents can be
read only late, a file replaced sooner would never be read. `measure` and `race` do not use the group; the callers put a barrier between
them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
NAME = re.compile(r"name-(\d+)\.(\d+)\.([\d-]+)\.([\d-]+)")


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
    """One node's part in the races: the rounds it won, its errors by name, and the record of each name."""

    won: list[int] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    records: list[str] = field(default_factory=list)

    def read(self, session: Path) -> None:
        """Read who won each name; "" where that cannot be read."""
        for number in range(ROUNDS):
            content = b""
            with contextlib.suppress(OSError):
                content = read_bytes(_raced(session, number), RECORD_BYTES)
            self.records.append(content.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Measured:
    """`lags`: the delays by kind ("content", "listing"); `clock_leads`: by node, how far its clock is ahead, and how exactly that is
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
    """One way to tell the others: when each number was sent, what each of the others was last seen to say, and the round trips."""

    def __init__(self, others: Sequence[int]) -> None:
        #: when each of our numbers was sent; they begin with 1
        self.sent = [0.0]
        self.heard = dict.fromkeys(others, 0)
        #: by other node: up to which of our numbers it has answered
        self.answered = dict.fromkeys(others, 0)
        self.trips: list[float] = []

    @property
    def number(self) -> int:
        """The last number that was sent."""
        return len(self.sent) - 1

    @property
    def all_answered(self) -> int:
        """The last number that all others have answered."""
        return min(self.answered.values())

    def answer(self, rank: int, number: int) -> None:
        """Node `rank` has seen our changes up to this number."""
        if self.answered[rank] < number <= self.number:
            self.trips.append(time.monotonic() - self.sent[self.answered[rank] + 1])
            self.answered[rank] = number

    def answers(self, ranks: Sequence[int]) -> str:
        """In a name: up to which number this node has seen those of each rank."""
        return "-".join(str(self.heard.get(rank, 0)) for rank in ranks)

    def times(self, delay: Callable[[float], float]) -> Times | None:
        """The delays, each of a round trip; also of one that lasts longer than all that have ended."""
        first = self.all_answered + 1
        waiting_s = time.monotonic() - self.sent[first] if first < len(self.sent) else 0.0
        longest = waiting_s > max(self.trips, default=0.0)
        return Times.of([delay(trip) for trip in self.trips], delay(waiting_s) if longest else 0.0)


class _Watch:
    """One node's part in `measure`."""

    def __init__(self, folder: Path, rank: int, members: Sequence[int]) -> None:
        self.folder, self.rank, self.members = folder, rank, members
        self.others = [each for each in members if each != rank]
        self.content, self.listing = _Channel(self.others), _Channel(self.others)
        self.leads: dict[str, tuple[float, float]] = {}
        self.reads = self.torn = self.backwards = 0
        self.finished: set[int] = set()
        self._name: Path | None = None

    def tell(self, *, done: bool) -> None:
        """Rename the own name, and replace the own file if all have read it, or if this node is done. Raises OSError."""
        if self.content.all_answered == self.content.number or done:
            self._replace(done)
        self.listing.sent.append(time.monotonic())
        answers = f"{self.listing.answers(self.members)}.{self.content.answers(self.members)}"
        name = self.folder / f"name-{self.rank}.{self.listing.number}.{answers}"
        if self._name is None:
            os.close(files.open_new(name))
        else:
            os.rename(self._name, name)
        self._name = name

    def _replace(self, done: bool) -> None:
        self.content.sent.append(time.monotonic())
        number = self.content.number
        body = {"number": number, "heard": self.content.heard, "time": time.time(), "done": done}
        filler = str(number % 10) * (FILLER + number % 7)
        files.write_atomic(self.folder / f"content-{self.rank}", json.dumps([body, filler]).encode())

    def look(self) -> None:
        names = os.listdir(self.folder)
        for rank in self.others:
            # A client may remember for half a minute that a name was not there.
            if f"content-{rank}" in names:
                self._read(rank)
        mine = self.members.index(self.rank)
        for name in names:
            match = NAME.fullmatch(name)
            if match and (rank := int(match[1])) in self.listing.heard:
                self.listing.heard[rank] = max(self.listing.heard[rank], int(match[2]))
                self.listing.answer(rank, int(match[3].split("-")[mine]))
                self.content.answer(rank, int(match[4].split("-")[mine]))

    def _read(self, rank: int) -> None:
        try:
            data = read_bytes(self.folder / f"content-{rank}", RECORD_BYTES)
        except OSError:
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
        if body["number"] > self.content.heard[rank]:
            self.content.heard[rank] = body["number"]
            self._compare_clocks(rank, body["time"], body["heard"][str(self.rank)])

    def _compare_clocks(self, rank: int, its_time: float, heard: int) -> None:
        """Its clock said `its_time` between when we wrote what it had heard, and now."""
        if not 0 < heard <= self.content.number:
            return
        uncertain_s = (time.monotonic() - self.content.sent[heard]) / 2
        known = self.leads.get(str(rank))
        if known is None or uncertain_s < known[1]:
            self.leads[str(rank)] = (its_time - (time.time() - uncertain_s), uncertain_s)

    def measured(self) -> Measured:
        listing = self.listing.times(lambda trip: trip / 2)
        # A file's number comes to the others as content, and their answer comes back as a name.
        back = listing.median if listing else 0.0
        found = {"listing": listing, "content": self.content.times(lambda trip: max(0.0, trip - back))}
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
            everyone = min(watch.content.all_answered, watch.listing.all_answered)
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


def race(session: Path, rank: int, num_nodes: int) -> Races:
    """Create names as the protocol does, each after the newest that this node knows, so that all nodes try the same at the same time."""
    folder, mine = session / "races", f"node-{rank}".encode()
    files.make_dirs(folder)
    result = Races()
    number, end = 0, time.monotonic() + LONGEST_S
    _line_up(folder, rank, num_nodes, end)
    while number < ROUNDS and time.monotonic() < end:
        try:
            if files.create_exclusive(_raced(session, number), mine, durable=False):
                result.won.append(number)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "unknown")
            result.errors[name] = result.errors.get(name, 0) + 1
        newest = max((int(name) for name in os.listdir(folder) if name.isdigit()), default=0)
        # Not always the frontier: a name that was decided long ago must have one winner too.
        number = max(number + 1, newest + 1 if number % 4 else 0)
    return result


def _line_up(folder: Path, rank: int, num_nodes: int, end: float) -> None:
    """Wait until all are here: a barrier lets some nodes pass before others, and whoever runs alone races nobody."""
    while time.monotonic() < end:
        # A change of one's own refreshes one's view of the folder.
        files.write_atomic(folder / f"here-{rank}", b"")
        if sum(name.startswith("here-") for name in os.listdir(folder)) >= num_nodes:
            return
        threading.Event().wait(PAUSE_S / 5)
