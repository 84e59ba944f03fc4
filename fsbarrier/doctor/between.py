"""Measures on several nodes at once in one folder: how late each sees the others' names, and who wins exclusive creates.

`measure` and `race` do not use the group; the callers put a barrier between them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fsbarrier.doctor.findings import NOTE, OK, REFUSED, SEVERITY, WARNING, Check, Times, shown
from fsbarrier.doctor.probes import NEEDED, judge_races
from fsbarrier.store import files
from fsbarrier.store.mounts import CLOSE_TO_OPEN, COHERENT, INSTEAD
from fsbarrier.store.reading import RECORD_BYTES, read_bytes

#: seconds to measure, the maximum if changes do not become visible, and the polling interval
MEASURE_S, LONGEST_S, PAUSE_S = 4.0, 25.0, 0.005
ROUNDS = 100
NAME = re.compile(r"name-(\d+)\.(\d+)\.(\d+)(\.done)?")
#: a mount that shows changes sooner than this counts as coherent; a longer delay makes barriers slow enough for a warning
FRESH_S, SLOW_S = 0.5, 2.0
RACES, LISTED = "exclusive-create races", "new name listed after"


@dataclass(slots=True)
class Races:
    """One node's results in the races: the rounds it won, its errors by name, and the winner recorded in each name."""

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
class NodeFindings:
    """The findings of one node. `delays`: until it lists another's new name; `reached`: the addresses at which each other node answers;
    `fresher`: mount options that reduce delays."""

    host: str
    boot_id: str
    mount: str
    fresher: str
    checks: Sequence[Check]
    races: Races
    delays: Times | None
    reached: Mapping[str, Sequence[str]]

    @staticmethod
    def of(message: Mapping[str, Any]) -> NodeFindings:
        """Rebuild from the JSON of `asdict`."""
        return msgspec.convert(message, NodeFindings)


#: findings by rank
Findings = Mapping[int, NodeFindings]


def measure(session: Path, rank: int, members: Sequence[int]) -> Times | None:
    """Measure how late other nodes see this node's names: it keeps renaming its own file, and the next node answers in its file's name.

    Each change thus makes a round trip that is timed by one clock, and both directions are tested on each node. Returns when this node and
    the one that it answers have measured enough, or changes do not become visible for LONGEST_S. Raises OSError.
    """
    folder, mine = session / "changes", members.index(rank)
    before, after = members[mine - 1], members[(mine + 1) % len(members)]
    files.make_dirs(folder)
    begin, sent, trips = time.monotonic(), [0.0], list[float]()
    # The newest number seen from `before`, and the newest of our numbers that `after` has answered.
    heard, answered, finished, result = 0, 0, False, None
    own = folder / f"own-{rank}"
    os.close(files.open_new(own))

    def tell(done: bool) -> None:
        nonlocal own
        sent.append(time.monotonic())
        name = folder / f"name-{rank}.{len(sent) - 1}.{heard}{'.done' if done else ''}"
        os.rename(own, name)
        own = name

    try:
        while (elapsed := time.monotonic() - begin) < LONGEST_S + MEASURE_S and not (result and finished):
            tell(result is not None)
            for match in filter(None, map(NAME.fullmatch, os.listdir(folder))):
                other, number, answer = int(match[1]), int(match[2]), int(match[3])
                if other == before:
                    heard, finished = max(heard, number), finished or match[4] is not None
                if other == after and answer > answered:
                    trips.append(time.monotonic() - sent[answered + 1])
                    answered = answer
            if result is None and ((elapsed > MEASURE_S and answered) or elapsed > LONGEST_S):
                # Count a round trip in progress if it already lasts longer than all finished ones.
                waiting_s = time.monotonic() - sent[answered + 1] if answered + 1 < len(sent) else 0.0
                longest = waiting_s > max(trips, default=0.0)
                result = Times.of([trip / 2 for trip in trips], waiting_s / 2 if longest else 0.0)
            threading.Event().wait(PAUSE_S)
    finally:
        # Publish `done` again, so that no node waits for this one, even if it is interrupted.
        with contextlib.suppress(OSError):
            tell(True)
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
        # Sometimes race for an older name: a name decided long ago must have one winner too.
        number = max(number + 1, newest + 1 if number % 4 else 0)
    return result


def _line_up(folder: Path, rank: int, num_nodes: int, end: float) -> None:
    """Wait until all nodes are here: a barrier lets some pass before others, and a node that runs alone races nobody."""
    while time.monotonic() < end:
        # A node's own change refreshes its view of the folder.
        files.write_atomic(folder / f"here-{rank}", b"")
        if sum(name.startswith("here-") for name in os.listdir(folder)) >= num_nodes:
            return
        threading.Event().wait(PAUSE_S / 5)


# --- conclusions --------------------------------------------------------------------------------------------------


def stale_s(findings: Findings) -> float:
    """The maximum age of what a node sees: a whole round trip, because one direction may have taken all of it."""
    return 2 * max((node.delays.most for node in findings.values() if node.delays), default=LONGEST_S)


def category_of(findings: Findings) -> str:
    """The filesystem class according to the measurements."""
    return COHERENT if stale_s(findings) < 2 * FRESH_S else CLOSE_TO_OPEN


def merged(checks: Mapping[int, Sequence[Check]]) -> list[Check]:
    """Merge the nodes' checks: identical findings become one line, the others name their node."""
    by_name: dict[str, dict[int, list[Check]]] = {}
    for rank, own in checks.items():
        for check in own:
            by_name.setdefault(check.name, {}).setdefault(rank, []).append(check)
    combined = []
    for name, by_rank in by_name.items():
        every = [check for own in by_rank.values() for check in own]
        level = max((check.level for check in every), key=SEVERITY.__getitem__)
        texts = {rank: "; ".join(check.finding for check in own) for rank, own in by_rank.items()}
        finding = "\n".join(f"node {rank}: {text}" for rank, text in texts.items())
        if len(set(texts.values())) == 1 and len(texts) == len(checks):
            finding = next(iter(texts.values()))
        advice = "; ".join(dict.fromkeys(check.advice for check in every if check.advice))
        combined.append(Check(name, level, finding, advice))
    return combined


def between_nodes(findings: Findings) -> list[Check]:
    """The checks between nodes."""
    checks = [_races(findings), _delays(findings), _connections(findings)]
    if len({node.boot_id for node in findings.values()}) == 1:
        finding = f"all {len(findings)} nodes are on one host, so visibility between hosts was not tested"
        checks.append(Check("hosts", NOTE, finding, "run doctor on the nodes of the run"))
    return checks


def _races(findings: Findings) -> Check:
    parts = {rank: node.races for rank, node in findings.items()}
    errors = sum((Counter(part.errors) for part in parts.values()), Counter[str]())
    winners = Counter(number for part in parts.values() for number in part.won)
    if not winners:
        return Check(RACES, REFUSED, f"no create succeeded ({', '.join(errors) or 'no error'})", NEEDED)
    decided = range(max(winners) + 1)
    check = judge_races(
        RACES, [[int(n in part.won) for n in decided] for part in parts.values()], f"{len(parts)} nodes"
    )
    winner = {number: f"node-{rank}" for rank, part in parts.items() for number in part.won}
    foreign = sum(
        any(part.records[number] not in ("", name) for part in parts.values())
        for number, name in winner.items()
    )
    if check.level == OK and foreign:
        finding = f"{foreign} of {ROUNDS} names contain a record that is not the winner's"
        return Check(RACES, REFUSED, finding, "nodes could read different decisions; use another filesystem")
    if check.level == OK and errors:
        counts = ", ".join(f"{count} x {error}" for error, count in errors.items())
        return Check(RACES, WARNING, f"{check.finding}; errors: {counts}", "see the server's log")
    return check


def _delays(findings: Findings) -> Check:
    every = [node.delays for node in findings.values() if node.delays]
    if not every:
        return Check(LISTED, REFUSED, "not measured: writing failed", INSTEAD)
    fresher = "; ".join(dict.fromkeys(node.fresher for node in findings.values()))
    worst = max(every, key=lambda times: (times.open, times.most))
    median = sorted(times.median for times in every)[len(every) // 2]
    most = f"{'not within' if worst.open else 'most'} {shown(worst.most)}"
    finding = f"median {shown(median)}, {most} ({sum(times.samples for times in every)} times)"
    if worst.open and worst.most > LONGEST_S / 3:
        unseen = f"{finding}: other nodes' heartbeats and records would not become visible"
        return Check(LISTED, REFUSED, unseen, fresher)
    if worst.most >= SLOW_S:
        return Check(LISTED, WARNING, f"{finding}: every barrier takes this long", fresher)
    return Check(LISTED, OK, finding)


def _connections(findings: Findings) -> Check:
    cut = [
        f"node {rank} cannot connect to node {other}"
        for rank, node in findings.items()
        for other, addresses in node.reached.items()
        if not addresses
    ]
    if cut:
        advice = "multi-node updates need connections between all nodes; check the firewall"
        return Check("ports", WARNING, "\n".join(cut), advice)
    used = {int(other): at[0] for node in findings.values() for other, at in node.reached.items()}
    where = ", ".join(f"node {rank} at {address}" for rank, address in sorted(used.items()))
    return Check("ports", OK, f"all nodes can connect to each other: {where}")
