"""Races between nodes for the same names, by the protocol's own exclusive create: does every name have one winner?"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from fsbarrier import files
from fsbarrier.doctor.findings import NOTE, OK, REFUSED, WARNING, Check, Findings, Races
from fsbarrier.doctor.meeting import Meeting
from fsbarrier.doctor.messages import Message
from fsbarrier.doctor.probes import NEEDED, judge_races

NAME = "exclusive-create races"
ROUNDS = 100
# A create writes a file, links it and removes its first name: on a network that takes some milliseconds.
ROUND_MIN_S, ROUND_MAX_S = 0.01, 0.03
#: how many rounds ahead a name is looked up: nobody has got there yet
AHEAD = 4
#: from the last node's readiness to the first race; and at most, whatever the clocks say
START_S, START_MAX_S = 0.2, 3.0


def _folder(meeting: Meeting) -> Path:
    return meeting.session / "races"


def prepare(meeting: Meeting) -> None:
    """Make the folder. Raises OSError."""
    files.make_dirs(_folder(meeting))


def race(meeting: Meeting, ready: Mapping[int, Message]) -> Races:
    """Create the same names as all the others at the same time, as the protocol does; then read who each name says won.

    `ready`: what each node's clock showed a moment ago, and how far the next rank's is ahead. Here alone clocks are used, to make the
    races close.
    Raises OSError, TooFewNodes.
    """
    me = meeting.rank
    leads, uncertain = zip(*(ready[rank]["clock"] or (0.0, 0.0) for rank in sorted(ready)), strict=True)
    # How far each clock is ahead of node 0's.
    ahead = {rank: sum(leads[:rank]) for rank in ready}
    last = max(said["time"] - ahead[rank] for rank, said in ready.items())
    round_s = min(ROUND_MAX_S, 4 * max(ROUND_MIN_S / 4, *uncertain))
    begin = time.monotonic() + min(START_MAX_S, max(0.0, last + START_S + ahead[me] - time.time()))
    races = _race(_folder(meeting), me, begin, round_s)
    meeting.exchange("raced", None)
    races.names.extend(map(_content, _paths(_folder(meeting))))
    return races


def _paths(folder: Path) -> list[Path]:
    return [folder / f"{number:03d}" for number in range(ROUNDS)]


def _race(folder: Path, me: int, begin: float, round_s: float) -> Races:
    mine, paths = f"node-{me}".encode(), _paths(folder)
    result, pause, end = (
        Races(links=_has_links(folder, me)),
        threading.Event(),
        begin + START_S + ROUNDS * round_s,
    )
    for number, path in enumerate(paths):
        # In each round another node comes a little early, by no more than the clocks are uncertain.
        due = begin + round_s * (number + ((number * (2 * me + 1)) % 16) / 32)
        # Look the name up before it exists: a mount that remembers absences should do so here as it would in a run.
        for absent in paths[:AHEAD] if number == 0 else paths[number + AHEAD - 1 : number + AHEAD]:
            absent.exists()
        pause.wait(max(0.0, min(due, end) - time.monotonic()))
        try:
            if files.create_exclusive(path, mine, durable=False, never_torn=True):
                result.won.append(number)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "unknown")
            result.errors[name] = result.errors.get(name, 0) + 1
    return result


def _has_links(folder: Path, me: int) -> bool:
    own = folder / f".{me}"
    files.write_atomic(own, b"")
    try:
        os.link(own, folder / f".{me}.link")
    except OSError:
        return False
    return True


def _content(path: Path) -> str:
    with contextlib.suppress(OSError):
        return files.read_created(path).decode(errors="replace")
    return ""


# --- what came of them ----------------------------------------------------------------------------------------------------


def judge(findings: Findings) -> Iterator[Check]:
    """What the races of all nodes say together."""
    parts = {rank: node.races for rank, node in findings.items()}
    if not all(part.links for part in parts.values()):
        yield Check("hard links", NOTE, "none here; a record's name itself is created exclusively instead")
    errors = sum((Counter(part.errors) for part in parts.values()), Counter[str]())
    if errors.total() >= ROUNDS * len(parts):
        yield Check(NAME, REFUSED, f"not to be had here ({', '.join(errors)})", NEEDED)
        return
    wins = [[int(number in set(part.won)) for number in range(ROUNDS)] for part in parts.values()]
    check = judge_races(NAME, wins, f"{len(parts)} nodes")
    if check.level != OK:
        yield check
    elif errors:
        counts = ", ".join(f"{count} x {error}" for error, count in errors.items())
        yield Check(NAME, WARNING, f"{check.finding}; errors: {counts}", "see the server's log")
    elif wrong := _foreign(parts):
        finding = f"{wrong} of {ROUNDS} names hold another node's record than the winner's"
        yield Check(NAME, REFUSED, finding, "two nodes would read two decisions; use another filesystem")
    else:
        yield check


def _foreign(parts: Mapping[int, Races]) -> int:
    """In how many rounds some node reads another record than the winner's. A record that it cannot read does not count."""
    winner = {number: rank for rank, part in parts.items() for number in part.won}
    return sum(
        any(part.names[number] not in ("", f"node-{rank}") for part in parts.values())
        for number, rank in winner.items()
    )
