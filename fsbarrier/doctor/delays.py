"""Measures how late a node sees changes made by another node, and the offsets between their clocks.

A delay is half of a round trip on one clock: this node writes, its neighbour (the next rank) sees it and replies, this node sees the reply.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier import files
from fsbarrier.doctor.findings import NOTE, OK, REFUSED, WARNING, Check, Findings, Times, shown
from fsbarrier.doctor.meeting import Meeting
from fsbarrier.doctor.messages import Message, pack, read, wait_for
from fsbarrier.host.mounts import INSTEAD
from fsbarrier.node.fingerprint import CLOCKS_APART_S

#: after this time, stop at this number of samples
ENOUGH_S, ENOUGH = 6.0, 2
#: a change that takes longer than half of this to become visible counts as never visible
LONGEST_S = 22.0
#: how often the nodes exchange whether they are still measuring
TELL_S = 0.2
#: a mount that shows changes sooner than this needs no increased timeouts
FRESH_S = 0.5
#: a longer delay makes barriers slow enough for a warning
SLOW_S = 2.0


@dataclass(frozen=True, slots=True)
class Channel:
    """A way to send a number to another node through a folder. `seen` returns None while the message is not visible. Both functions may
    raise OSError."""

    label: str
    tell: Callable[[Path, int], None]
    seen: Callable[[Path, int], Message | None]
    samples: int = 60
    #: time limit for all samples
    longest_s: float = LONGEST_S


def _replace(folder: Path, number: int) -> None:
    files.write_atomic(folder / "content", pack({"number": number, "time": time.time()}))


def _replaced(folder: Path, number: int) -> Message | None:
    message = read(folder / "content")
    return message if message is not None and message["number"] >= number else None


def _create(folder: Path, number: int) -> None:
    os.close(files.open_new(folder / str(number)))


def _listed(folder: Path, number: int) -> Message | None:
    return {} if str(number) in os.listdir(folder) else None


def _found(folder: Path, number: int) -> Message | None:
    return {} if (folder / str(number)).exists() else None


CHANNELS = {
    # Heartbeats use this channel. The content also carries the other node's clock.
    "content": Channel("replaced file seen after", _replace, _replaced, samples=120),
    # Barriers use this channel.
    "listing": Channel("new name listed after", _create, _listed),
    # A name that was looked up before it existed. No run waits in this way, so a rough measurement is enough.
    "absent": Channel("absent name found after", _create, _found, samples=30, longest_s=12.0),
}


@dataclass(slots=True)
class Delays:
    """Half round trips in seconds, by kind; `given_up`: duration of the last one if it was abandoned."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in CHANNELS})
    given_up: dict[str, float] = field(default_factory=dict)
    #: (lead of the neighbour's clock, round trip)
    clocks: list[tuple[float, float]] = field(default_factory=list)

    def times(self) -> dict[str, Times]:
        found = {kind: Times.of(self.seconds[kind], self.given_up.get(kind)) for kind in CHANNELS}
        return {kind: item for kind, item in found.items() if item is not None}

    def clock(self) -> tuple[float, float] | None:
        """(lead of the neighbour's clock, uncertainty), from the fastest round trip."""
        if not self.clocks:
            return None
        lead, trip = min(self.clocks, key=lambda item: item[1])
        return lead, trip / 2


def prepare(meeting: Meeting) -> None:
    """Create the files that the neighbours will look up. Raises OSError."""
    for kind, channel in CHANNELS.items():
        for folder in _ping_pong(meeting, kind, meeting.rank):
            files.make_dirs(folder)
            channel.tell(folder, -1)


def _ping_pong(meeting: Meeting, kind: str, owner: int) -> tuple[Path, Path]:
    """The paths of the request and reply of one node's round trips."""
    folder = meeting.session / kind
    return folder / f"ping-{owner}", folder / f"pong-{owner}"


@contextlib.contextmanager
def answering(meeting: Meeting) -> Iterator[None]:
    """Reply to the previous rank for the duration of the `with` block."""
    owner, stop = (meeting.rank - 1) % len(meeting.members), threading.Event()
    threads = [
        _thread(_answer, channel, *_ping_pong(meeting, kind, owner), stop)
        for kind, channel in CHANNELS.items()
    ]
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure(meeting: Meeting) -> tuple[Delays, dict[int, Message]]:
    """Measure round trips with the next rank until all nodes have finished. Also returns each node's clock at the end.

    Raises TooFewNodes as soon as any node has left, StoreError.
    """
    result, stop = Delays(), threading.Event()
    asking = [
        _thread(_ask, kind, *_ping_pong(meeting, kind, meeting.rank), result, stop) for kind in CHANNELS
    ]
    try:
        while True:
            for thread in asking:
                thread.join(TELL_S / len(asking))
            measuring = any(thread.is_alive() for thread in asking)
            own = {"measuring": measuring, "time": time.time(), "clock": result.clock()}
            ready = meeting.exchange("ready", own)
            if not any(said["measuring"] for said in ready.values()):
                return result, ready
    finally:
        stop.set()
        for thread in asking:
            thread.join()


def _thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _ask(kind: str, ping: Path, pong: Path, result: Delays, stop: threading.Event) -> None:
    channel, start, pause = CHANNELS[kind], time.monotonic(), threading.Event()
    end = start + channel.longest_s
    for number in range(channel.samples):
        if kind == "absent":
            # Let both sides look up the absent name first.
            channel.seen(pong, number)
            pause.wait(0.02)
        begin, sent = time.monotonic(), time.time()
        if begin >= end or (begin >= start + ENOUGH_S and number >= ENOUGH):
            return
        try:
            channel.tell(ping, number)
        except OSError:
            continue
        answer = _await(channel, pong, number, end, stop)
        took, now = time.monotonic() - begin, time.time()
        if answer is None:
            result.given_up[kind] = took / 2
            return
        result.seconds[kind].append(took / 2)
        if "time" in answer:
            result.clocks.append((answer["time"] - (sent + now) / 2, took))


def _answer(channel: Channel, ping: Path, pong: Path, stop: threading.Event) -> None:
    end = time.monotonic() + 4 * LONGEST_S
    for number in range(channel.samples):
        if _await(channel, ping, number, end, stop) is None:
            return
        with contextlib.suppress(OSError):
            channel.tell(pong, number)


def _await(channel: Channel, folder: Path, number: int, end: float, stop: threading.Event) -> Message | None:
    def look() -> Message | None:
        with contextlib.suppress(OSError):
            return channel.seen(folder, number)
        return None

    return wait_for(look, end, stop)


# --- judgement ------------------------------------------------------------------------------------------------------------


def judge(findings: Findings, fresher: str) -> Iterator[Check]:
    """The visibility delay over all nodes. `fresher`: advice on mount options that reduce it."""
    for kind, channel in CHANNELS.items():
        every, label = [node.lags[kind] for node in findings.values() if kind in node.lags], channel.label
        if not every:
            yield Check(label, REFUSED, "not measured: writing failed", INSTEAD)
            continue
        worst = max(every, key=lambda times: (times.open, times.most))
        median = sorted(times.median for times in every)[len(every) // 2]
        p99, samples = max(times.p99 for times in every), sum(times.samples for times in every)
        most = f"{'not within' if worst.open else 'most'} {shown(worst.most)}"
        finding = f"median {shown(median)}, 99th {shown(p99)}, {most} ({samples} half round trips)"
        if kind == "absent":
            late = worst.open or worst.most >= FRESH_S
            yield Check(
                label, NOTE if late else OK, finding + ("; runs do not depend on this" if late else "")
            )
        elif worst.open:
            what = "heartbeats" if kind == "content" else "results of other nodes"
            yield Check(label, REFUSED, f"{finding}: {what} would not become visible", fresher)
        elif worst.most >= SLOW_S:
            each = ": every barrier takes this long" if kind == "listing" else ""
            yield Check(label, WARNING, finding + each, fresher)
        else:
            yield Check(label, OK, finding)


def judge_clocks(findings: Findings) -> Check:
    """Judge the offsets between the nodes' clocks."""
    ranks, parts, worst = list(findings), [], 0.0
    for rank, following in zip(ranks, [*ranks[1:], *ranks[:1]], strict=True):
        if (clock := findings[rank].clock) is not None:
            lead, uncertain = clock
            side = "ahead of" if lead >= 0 else "behind"
            parts.append(f"node {following} is {shown(abs(lead))} (± {shown(uncertain)}) {side} node {rank}")
            worst = max(worst, abs(lead) - uncertain)
    if worst > CLOCKS_APART_S:
        advice = "runs do not depend on clocks, but timestamps in logs will be out of order; use NTP"
        return Check("clocks", NOTE, "\n".join(parts), advice)
    return Check("clocks", OK, "\n".join(parts) or "not measured")
