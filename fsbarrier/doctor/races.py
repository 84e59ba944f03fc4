"""Races between nodes for the same names, in each way in which the protocol may decide: does every name have one winner?"""

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
from fsbarrier.host.mounts import INSTEAD

#: kind -> what the report calls it
KINDS = {"link": "hard-link races", "create": "exclusive-create races"}
ROUNDS = 100
ROUND_MIN_S, ROUND_MAX_S = 0.002, 0.03
#: how many rounds ahead a name is looked up: nobody has got there yet
AHEAD = 4
#: from the last node's readiness to the first race; and at most, whatever the clocks say
START_S, START_MAX_S = 0.2, 3.0


def prepare(meeting: Meeting) -> None:
    """Make the folders. Raises OSError."""
    for kind in KINDS:
        files.make_dirs(meeting.session / kind)


def race(meeting: Meeting, ready: Mapping[int, Message]) -> dict[str, Races]:
    """Create the same names as all the others at the same time, in each way; then read who each name says won.

    `ready`: what each node's clock showed a moment ago, and how far the next rank's is ahead. Here alone clocks are used, to make the
    races close.
    Raises OSError, TooFewNodes.
    """
    me = meeting.rank
    leads, uncertain = zip(*(ready[rank]["clock"] or (0.0, 0.0) for rank in sorted(ready)), strict=True)
    # How far each clock is ahead of node 0's.
    ahead = {rank: sum(leads[:rank]) for rank in ready}
    last = max(said["time"] - ahead[rank] for rank, said in ready.items())
    round_s = min(ROUND_MAX_S, 4 * max(ROUND_MIN_S, *uncertain))
    begin = time.monotonic() + min(START_MAX_S, max(0.0, last + START_S + ahead[me] - time.time()))
    found = {}
    for kind in KINDS:
        meeting.interruption.heed()
        found[kind] = _race(meeting.session / kind, me, kind, begin, round_s)
        begin += ROUNDS * round_s + START_S
    meeting.exchange("raced", None)
    for kind, races in found.items():
        races.names.extend(map(_content, _paths(meeting.session / kind)))
    return found


def _paths(folder: Path) -> list[Path]:
    return [folder / f"{number:03d}" for number in range(ROUNDS)]


def _race(folder: Path, me: int, kind: str, begin: float, round_s: float) -> Races:
    own, mine, paths = folder / f".{me}", f"node-{me}".encode(), _paths(folder)
    files.write_atomic(own, mine)
    result, pause, end = Races(), threading.Event(), begin + START_S + ROUNDS * round_s
    for number, path in enumerate(paths):
        # Now one node is a little early, now another, by up to what the clocks are uncertain.
        due = begin + round_s * (number + ((number * (2 * me + 1)) % 16) / 32)
        # A mount that remembers absences is made to do so, as it would in a run.
        for absent in paths[:AHEAD] if number == 0 else paths[number + AHEAD - 1 : number + AHEAD]:
            absent.exists()
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
        # An absence that this mount remembers: a listing makes it look again.
        os.listdir(path.parent)
    there, mine = os.stat(path), os.stat(own)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _create(path: Path, data: bytes) -> bool:
    """Create the name itself exclusively."""
    try:
        fd = files.open_new(path)
    except OSError:
        # Some mounts answer EPERM to the loser.
        if path.exists():
            return False
        raise
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    return True


def _content(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


# --- what came of them ----------------------------------------------------------------------------------------------------


def judge(findings: Findings) -> Iterator[Check]:
    """What the races of all nodes say together."""
    parts = {kind: {rank: node.races[kind] for rank, node in findings.items()} for kind in KINDS}
    failed = {kind: _all_failed(by_rank) for kind, by_rank in parts.items()}
    for kind, name in KINDS.items():
        if not failed[kind]:
            yield _judge_one(name, parts[kind])
        elif kind == "link" and not failed["create"]:
            yield Check(name, NOTE, f"{failed[kind]}; the exclusive create of the name decides instead")
        else:
            yield Check(name, REFUSED, failed[kind], NEEDED)


def _errors(parts: Mapping[int, Races]) -> Counter[str]:
    return sum((Counter(part.errors) for part in parts.values()), Counter[str]())


def _all_failed(parts: Mapping[int, Races]) -> str:
    """Why no node could take part in a single race of this kind; empty where one could."""
    errors = _errors(parts)
    return f"not to be had here ({', '.join(errors)})" if errors.total() >= ROUNDS * len(parts) else ""


def _judge_one(name: str, parts: Mapping[int, Races]) -> Check:
    wins = [[int(number in set(part.won)) for number in range(ROUNDS)] for part in parts.values()]
    check = judge_races(name, wins, f"{len(parts)} nodes")
    if check.level != OK:
        return Check(name, check.level, check.finding, check.advice or INSTEAD)
    if errors := _errors(parts):
        counts = ", ".join(f"{count} x {error}" for error, count in errors.items())
        return Check(name, WARNING, f"{check.finding}; errors: {counts}", "see the server's log")
    if wrong := _foreign(parts):
        finding = f"{wrong} of {ROUNDS} names hold another node's record than the winner's"
        return Check(name, REFUSED, finding, "two nodes would read two decisions; use another filesystem")
    return check


def _foreign(parts: Mapping[int, Races]) -> int:
    """In how many rounds some node reads something else than what the winner wrote. What it cannot read does not count."""
    winner = {number: rank for rank, part in parts.items() for number in part.won}
    return sum(
        any(part.names[number] not in ("", f"node-{rank}") for part in parts.values())
        for number, rank in winner.items()
    )
