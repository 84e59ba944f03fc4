"""Races between nodes to create the same names with the protocol's exclusive create: each name must have exactly one winner."""

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
# A create writes a file, links it and removes its temporary name, which takes some milliseconds on a network.
ROUND_MIN_S, ROUND_MAX_S = 0.01, 0.03
#: how many rounds ahead a name is looked up, before any node creates it
AHEAD = 4
#: delay from the last node's readiness to the first race, and its upper limit in case the clocks disagree
START_S, START_MAX_S = 0.2, 3.0


def _folder(meeting: Meeting) -> Path:
    return meeting.session / "races"


def prepare(meeting: Meeting) -> None:
    """Create the folder. Raises OSError."""
    files.make_dirs(_folder(meeting))


def race(meeting: Meeting, ready: Mapping[int, Message]) -> Races:
    """Create the same names at the same time as the other nodes, as the protocol does; then read the winner of each name.

    `ready`: each node's clock a moment ago, and the lead of the next rank's clock. Clocks are used only here, to make the races close.
    Raises OSError, TooFewNodes.
    """
    me = meeting.rank
    leads, uncertain = zip(*(ready[rank]["clock"] or (0.0, 0.0) for rank in sorted(ready)), strict=True)
    # The lead of each clock over node 0's.
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
        # In each round a different node starts slightly early, within the uncertainty of the clocks.
        due = begin + round_s * (number + ((number * (2 * me + 1)) % 16) / 32)
        # Look the name up before it exists, so that a mount with negative caching behaves as in a run.
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


# --- judgement ------------------------------------------------------------------------------------------------------------


def judge(findings: Findings) -> Iterator[Check]:
    """Judge the races of all nodes."""
    parts = {rank: node.races for rank, node in findings.items()}
    if not all(part.links for part in parts.values()):
        yield Check("hard links", NOTE, "not supported; records are created with O_EXCL instead")
    errors = sum((Counter(part.errors) for part in parts.values()), Counter[str]())
    if errors.total() >= ROUNDS * len(parts):
        yield Check(NAME, REFUSED, f"not supported ({', '.join(errors)})", NEEDED)
        return
    wins = [[int(number in set(part.won)) for number in range(ROUNDS)] for part in parts.values()]
    check = judge_races(NAME, wins, f"{len(parts)} nodes")
    if check.level != OK:
        yield check
    elif errors:
        counts = ", ".join(f"{count} x {error}" for error, count in errors.items())
        yield Check(NAME, WARNING, f"{check.finding}; errors: {counts}", "see the server's log")
    elif wrong := _foreign(parts):
        finding = f"{wrong} of {ROUNDS} names contain a record that is not the winner's"
        yield Check(NAME, REFUSED, finding, "nodes could read different decisions; use another filesystem")
    else:
        yield check


def _foreign(parts: Mapping[int, Races]) -> int:
    """The number of rounds in which some node read a record that is not the winner's. Unreadable records do not count."""
    winner = {number: rank for rank, part in parts.items() for number in part.won}
    return sum(
        any(part.names[number] not in ("", f"node-{rank}") for part in parts.values())
        for number, rank in winner.items()
    )
