"""What several nodes find out together: who wins a race, what a reader sees, how late things show, whose clock is off, who is reachable.

Nothing here compares two hosts' clocks, except to say how far they are apart. A delay is half of a round trip on one clock: this node
writes, its neighbour sees it and writes, this node sees that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.doctor.findings import Times
from fsbarrier.doctor.meeting import BEAT_S, Meeting
from fsbarrier.doctor.messages import Message, Waiter, pack, read, unpack

KINDS = ("link", "create")
FOLDERS = (*KINDS, "readers", "content", "absent", "names")
ROUNDS = 100
ROUND_MIN_S, ROUND_MAX_S = 0.002, 0.03
AHEAD = 4  # how many rounds ahead a name is looked up: nobody has got there yet
START_S, START_MAX_S = (
    0.2,
    3.0,
)  # from the last node's readiness to the first race; and whatever the clocks say
READING_S = 1.5
LAG_S = 22.0
ABSENT_S = 12.0  # nothing waits that way: to know that it is long is enough
ENOUGH_S, ENOUGH = 6.0, 2  # after so long, so many samples do
SAMPLES = {"content": 120, "listing": 60, "absent": 30}


@dataclass
class Races:
    """One node's part in races of one kind: the rounds that it was told it won, and errors by name."""

    won: list[int] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


@dataclass
class Reading:
    """What a reader saw of files that other nodes replaced under it."""

    reads: int = 0
    torn: int = 0
    missing: int = 0
    backwards: int = 0


def race(meeting: Meeting, me: int, clock: tuple[float, float] | None) -> dict[str, tuple[Races, list[str]]]:
    """Create the same names as all the others at the same time, in each way; then who each name says won.

    `clock`: how far the next rank's clock is ahead, and how uncertain that is. Here alone clocks are used, to make the races close.
    Raises OSError, TooFewNodes.
    """
    lead, uncertain = clock or (0.0, 0.0)
    ready = meeting.exchange("ready", {"now": time.time(), "lead": lead, "uncertain": uncertain})
    ahead = {rank: sum(ready[r]["lead"] for r in range(rank)) for rank in ready}  # of node 0's clock
    last = max(message["now"] - ahead[rank] for rank, message in ready.items())
    round_s = min(ROUND_MAX_S, 4 * max(ROUND_MIN_S, *(message["uncertain"] for message in ready.values())))
    begin = time.monotonic() + min(START_MAX_S, max(0.0, last + START_S + ahead[me] - time.time()))
    result = {}
    for kind in KINDS:
        meeting.breaks_off()
        result[kind] = _race(meeting.session / kind, me, kind, begin, round_s)
        begin += ROUNDS * round_s + START_S
    meeting.exchange("raced", {})
    names = {kind: [_content(path) for path in _paths(meeting.session / kind)] for kind in KINDS}
    return {kind: (result[kind], names[kind]) for kind in KINDS}


def _paths(folder: Path) -> list[Path]:
    return [folder / f"{number:03d}" for number in range(ROUNDS)]


def _race(folder: Path, me: int, kind: str, begin: float, round_s: float) -> Races:
    own, mine, paths = folder / f".{me}", f"node-{me}".encode(), _paths(folder)
    files.write_atomic(own, mine)
    result, pause, end = Races(), threading.Event(), begin + START_S + ROUNDS * round_s
    for number, path in enumerate(paths):
        # now one is a little early, now another, by up to what the clocks are uncertain
        due = begin + round_s * (number + ((number * (2 * me + 1)) % 16) / 32)
        for absent in paths[:AHEAD] if number == 0 else paths[number + AHEAD - 1 : number + AHEAD]:
            absent.exists()  # a mount that remembers absences does so now, as it would in a run
        pause.wait(max(0.0, min(due, end) - time.monotonic()))
        try:
            if _link(own, path) if kind == "link" else _create(path, mine):
                result.won.append(number)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "unknown")
            result.errors[name] = result.errors.get(name, 0) + 1
    return result


def _link(own: Path, path: Path) -> bool:
    """Publish by a hard link, and see by identity whose it is."""
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    except OSError:
        if not path.exists():
            raise
    if not path.exists():
        os.listdir(path.parent)  # an absence that is remembered: look again
    there, mine = os.stat(path), os.stat(own)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _create(path: Path, data: bytes) -> bool:
    """Create the name itself exclusively."""
    try:
        fd = files.open_new(path)
    except OSError:
        if path.exists():  # some mounts say EPERM to the loser
            return False
        raise
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    return True


def _content(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def prepare(meeting: Meeting, me: int) -> None:
    """Make what the others will look for, before they are told to. Raises OSError."""
    files.write_atomic(meeting.session / "readers" / str(me), _reader_file(0))
    for kind in SAMPLES:
        for part in ("ping", "pong"):
            Channel(meeting.session, kind, me, part).make()


def _reader_file(number: int) -> bytes:
    return pack({"n": number, "filler": str(number % 10) * (4000 + number % 7)})


def reading(meeting: Meeting, me: int) -> Reading:
    """Replace one's own file again and again while reading the others'."""
    folder = meeting.session / "readers"
    others = [folder / str(rank) for rank in meeting.members if rank != me]
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.002):
            number += 1
            with contextlib.suppress(OSError):
                files.write_atomic(folder / str(me), _reader_file(number))

    writer = _thread(write)
    result, newest, end = Reading(), dict.fromkeys(others, 0), time.monotonic() + READING_S
    while time.monotonic() < end:
        for path in others:
            result.reads += 1
            _read_one(path, newest, result)
    stop.set()
    writer.join()
    return result


def _read_one(path: Path, newest: dict[Path, int], result: Reading) -> None:
    try:
        message = unpack(path.read_bytes())
    except OSError:
        result.missing += 1
        return
    if message is None:
        result.torn += 1
        return
    result.backwards += message["n"] < newest[path]
    newest[path] = max(newest[path], message["n"])


# --- how late things show -------------------------------------------------------------------------------------------------


@dataclass
class Lags:
    """Half round trips in seconds, by kind; `given_up`: what the last one had taken when time was over."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in SAMPLES})
    given_up: dict[str, float] = field(default_factory=dict)
    clocks: list[tuple[float, float]] = field(default_factory=list)  # (the other's lead, round trip)

    def times(self) -> dict[str, Times]:
        found = {kind: Times.of(self.seconds[kind], self.given_up.get(kind)) for kind in SAMPLES}
        return {kind: item for kind, item in found.items() if item is not None}

    def clock(self) -> tuple[float, float] | None:
        """(how far the neighbour's clock is ahead, how uncertain that is), from the quickest round trip."""
        if not self.clocks:
            return None
        lead, trip = min(self.clocks, key=lambda item: item[1])
        return lead, trip / 2


class Channel:
    """A way to tell the neighbour a number and to see that it did: `kind` says by what."""

    def __init__(self, session: Path, kind: str, owner: int, part: str) -> None:
        """`owner`: whose round trips these are; `part`: ping or pong."""
        self.kind, self.name = kind, f"{part}-{owner}"
        folder = {"content": "content", "listing": f"names/{self.name}", "absent": "absent"}[kind]
        self.folder = session / folder

    def make(self) -> None:
        """What must be there before anybody looks. Raises OSError."""
        if self.kind == "listing":
            files.make_dirs(self.folder)
        elif self.kind == "content":
            files.write_atomic(self.folder / self.name, pack({"n": -1}))

    def tell(self, number: int, **fields: Any) -> None:
        if self.kind == "content":
            files.write_atomic(self.folder / self.name, pack({"n": number, **fields}))
        elif self.kind == "listing":
            os.close(files.open_new(self.folder / f"{number:06d}"))
        else:
            os.close(files.open_new(self.folder / f"{self.name}-{number:06d}"))

    def seen(self, number: int) -> Message | None:
        """What was told with this number or a later one; None while it cannot be seen."""
        if self.kind == "content":
            message = read(self.folder / self.name)
            return message if message is not None and message["n"] >= number else None
        if self.kind == "listing":
            return {} if f"{number:06d}" in os.listdir(self.folder) else None
        return {} if (self.folder / f"{self.name}-{number:06d}").exists() else None


class Answering:
    """Answers the rank before for as long as the `with` block lasts."""

    def __init__(self, meeting: Meeting, me: int) -> None:
        ranks = list(meeting.members)
        self._session, self._owner = meeting.session, ranks[ranks.index(me) - 1]
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Answering:
        for kind in SAMPLES:
            ping, pong = (Channel(self._session, kind, self._owner, part) for part in ("ping", "pong"))
            self._threads.append(_thread(_answer, ping, pong, self._stop))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def lags(meeting: Meeting, me: int) -> Lags:
    """Round trips with the next rank. Raises TooFewNodes as soon as any node has gone, OSError."""
    result, begin, asking, stop = Lags(), time.monotonic(), [], threading.Event()
    for kind in SAMPLES:
        ping, pong = (Channel(meeting.session, kind, me, part) for part in ("ping", "pong"))
        end = begin + (ABSENT_S if kind == "absent" else LAG_S)
        asking.append(_thread(_ask, ping, pong, result, (begin + ENOUGH_S, end), stop))
    try:
        for thread in asking:
            while thread.is_alive():
                meeting.heed("ready", meeting.members.keys() - {me})
                thread.join(BEAT_S)
    finally:
        stop.set()
        for thread in asking:
            thread.join()
    return result


def _thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _ask(
    ping: Channel, pong: Channel, result: Lags, until: tuple[float, float], stop: threading.Event
) -> None:
    (enough, end), pause = until, threading.Event()
    for number in range(SAMPLES[ping.kind]):
        if ping.kind == "absent":  # let both sides look in vain first
            pong.seen(number)
            pause.wait(0.02)
        begin, sent = time.monotonic(), time.time()
        if begin >= end or (begin >= enough and number >= ENOUGH):
            return
        try:
            ping.tell(number)
        except OSError:
            continue
        answer = _await(pong, number, end, stop)
        took, now = time.monotonic() - begin, time.time()
        if answer is None:
            result.given_up[ping.kind] = took / 2
            return
        result.seconds[ping.kind].append(took / 2)
        if "at" in answer:
            result.clocks.append((answer["at"] - (sent + now) / 2, took))


def _answer(ping: Channel, pong: Channel, stop: threading.Event) -> None:
    end = time.monotonic() + 4 * LAG_S
    for number in range(SAMPLES[ping.kind]):
        if _await(ping, number, end, stop) is None:
            return
        with contextlib.suppress(OSError):
            pong.tell(number, at=time.time())


def _await(channel: Channel, number: int, end: float, stop: threading.Event | None = None) -> Message | None:
    waiter = Waiter(end, stop)
    while True:
        try:
            answer = channel.seen(number)
        except OSError:
            answer = None
        if answer is not None:
            return answer
        if not waiter.again():
            return None


def found(races: dict[str, tuple[Races, list[str]]], read_: Reading, lag: Lags) -> Message:
    """All that this node measured, to tell the others."""
    return {
        "races": {kind: {**asdict(item), "names": names} for kind, (item, names) in races.items()},
        "reading": asdict(read_),
        "lags": {kind: asdict(times) for kind, times in lag.times().items()},
        "clock": lag.clock(),
    }
