"""Draws the conclusions: what several nodes measured becomes lines, a class, timeouts, and a refusal where there must be one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fsbarrier.doctor.across import LAG_S, ROUNDS
from fsbarrier.doctor.findings import NOTE, OK, REFUSED, SEVERITY, WARNING, Check, Times, shown
from fsbarrier.doctor.probes import NEEDED, judge_races
from fsbarrier.machine.mounts import CLOSE_TO_OPEN, COHERENT, INSTEAD
from fsbarrier.protocol.timing import BEAT_S, DEAD_S, SUSPECT_S

Message = Mapping[str, Any]
FRESH_S = 0.5  # what is shown sooner than this needs no longer timeouts
SLOW_S = 2.0
CLOCKS_S = 5.0
LABELS = {
    "content": "replaced file seen after",
    "listing": "new name listed after",
    "absent": "absent name found after",
}
RACE_NAMES = {"link": "hard-link races", "create": "exclusive-create races"}


def timeouts(stale_s: float) -> dict[str, float]:
    """The settings that fit a mount on which what a node sees may be `stale_s` seconds old."""
    late = round(stale_s + 0.5) if stale_s >= FRESH_S else 0
    return {
        "coordination.beat_s": BEAT_S,
        "coordination.suspect_s": SUSPECT_S + late,
        "coordination.dead_s": DEAD_S + 4 * late,
    }


def merged(checks: Mapping[int, Sequence[Check]]) -> list[Check]:
    """Each node's lines as one list: what all say alike is one line, the rest says who."""
    by_name: dict[str, dict[int, list[Check]]] = {}
    for rank, own in checks.items():
        for check in own:
            by_name.setdefault(check.name, {}).setdefault(rank, []).append(check)
    found = []
    for name, by_rank in by_name.items():
        level = max((c.level for own in by_rank.values() for c in own), key=SEVERITY.__getitem__)
        said = {rank: "; ".join(check.finding for check in own) for rank, own in by_rank.items()}
        if len(set(said.values())) == 1 and len(said) == len(checks):
            finding = next(iter(said.values()))
        else:
            finding = "\n".join(f"node {rank}: {text}" for rank, text in said.items())
        advice = "; ".join(dict.fromkeys(c.advice for own in by_rank.values() for c in own if c.advice))
        found.append(Check(name, level, finding, advice))
    return found


# --- between nodes --------------------------------------------------------------------------------------------------------


def between(said: Mapping[int, Message], hint: str) -> list[Check]:
    """The lines about what only several nodes can tell. `hint`: the mount options that make this filesystem fresher."""
    hosts = {message["about"]["boot_id"] for message in said.values()}
    checks = [
        *_races(said),
        _reading(said),
        *_lags(said, hint),
        _clocks(said),
        *_reach(said),
        *_differences(said),
    ]
    if len(hosts) == 1:
        finding = f"all {len(said)} nodes are on one host: what other hosts see is not proven"
        checks.append(Check("hosts", NOTE, finding, "start doctor on the nodes that will run"))
    return checks


def _races(said: Mapping[int, Message]) -> Iterator[Check]:
    found = {kind: _race(kind, said) for kind in RACE_NAMES}
    failed = [kind for kind, check in found.items() if check.finding.startswith("not to be had")]
    for kind, check in found.items():
        if failed == ["link"] and kind == "link":
            yield Check(
                check.name, NOTE, f"{check.finding}; the exclusive create of the name decides instead"
            )
        else:
            yield check


def _race(kind: str, said: Mapping[int, Message]) -> Check:
    name, nodes = RACE_NAMES[kind], f"{len(said)} nodes"
    parts = {rank: message["races"][kind] for rank, message in said.items()}
    errors: dict[str, int] = {}
    for part in parts.values():
        for error, count in part["errors"].items():
            errors[error] = errors.get(error, 0) + count
    if sum(errors.values()) >= ROUNDS * len(said):
        return Check(name, REFUSED, f"not to be had here ({', '.join(errors)})", NEEDED)
    wins = [[int(number in set(part["won"])) for number in range(ROUNDS)] for part in parts.values()]
    check = judge_races(name, wins, nodes)
    if check.level != OK:
        return Check(name, check.level, check.finding, check.advice or INSTEAD)
    if errors:
        shown_errors = ", ".join(f"{count} x {error}" for error, count in errors.items())
        return Check(name, WARNING, f"{check.finding}; errors: {shown_errors}", "see the server's log")
    wrong = _foreign(parts)
    if wrong:
        finding = f"{wrong} of {ROUNDS} names hold another node's record than the winner's"
        return Check(name, REFUSED, finding, "two nodes would read two decisions; use another filesystem")
    return check


def _foreign(parts: Mapping[int, Message]) -> int:
    """In how many rounds some node reads something else than what the winner wrote. What it cannot read does not count."""
    winner = {number: rank for rank, part in parts.items() for number in part["won"]}
    return sum(
        any(part["names"][number] not in ("", f"node-{rank}") for part in parts.values())
        for number, rank in winner.items()
    )


def _reading(said: Mapping[int, Message]) -> Check:
    reads, torn, missing, back = (
        sum(message["reading"][key] for message in said.values())
        for key in ("reads", "torn", "missing", "backwards")
    )
    finding = f"{reads} reads of files that others replaced: {torn} torn, {missing} missing, {back} older than before"
    if torn or back:
        return Check(
            "replace under readers", WARNING, finding, "records carry digests and are read again: slower"
        )
    return Check("replace under readers", NOTE if missing else OK, finding)


def _lags(said: Mapping[int, Message], hint: str) -> Iterator[Check]:
    for kind, label in LABELS.items():
        every = {
            rank: Times(**message["lags"][kind]) for rank, message in said.items() if kind in message["lags"]
        }
        if not every:
            yield Check(label, REFUSED, "not measured: nothing could be written", INSTEAD)
            continue
        worst = max(every.values(), key=lambda times: (times.open, times.most))
        median = sorted(times.median for times in every.values())[len(every) // 2]
        p99 = max(times.p99 for times in every.values())
        samples = sum(times.samples for times in every.values())
        most = f"{'not within' if worst.open else 'most'} {shown(worst.most)}"
        finding = f"median {shown(median)}, 99th {shown(p99)}, {most} ({samples} half round trips)"
        if kind == "absent":
            late = worst.open or worst.most >= FRESH_S
            yield Check(label, NOTE if late else OK, finding + ("; nothing waits that way" if late else ""))
        elif worst.open:
            what = "a node's heartbeat" if kind == "content" else "what a node has done"
            yield Check(label, REFUSED, f"{finding}: {what} would not be seen", hint)
        else:
            slow = worst.most >= SLOW_S
            text = f"{finding}: each barrier takes that long" if slow and kind == "listing" else finding
            yield Check(label, WARNING if slow else OK, text, hint if slow else "")


def stale_s(said: Mapping[int, Message]) -> float:
    """How old what a node sees may be: a whole round trip, as one way may have taken all of it."""
    most = [
        2 * times["most"]
        for message in said.values()
        for kind, times in message["lags"].items()
        if kind in ("content", "listing")
    ]
    return max(most, default=2 * LAG_S)


def kind_of(said: Mapping[int, Message]) -> str:
    """The class that the measurements speak for."""
    every = [times["most"] for message in said.values() for times in message["lags"].values()]
    return COHERENT if every and max(every) < FRESH_S else CLOSE_TO_OPEN


def _clocks(said: Mapping[int, Message]) -> Check:
    ranks, parts, worst = list(said), [], 0.0
    for rank, message in said.items():
        if message["clock"] is not None:
            lead, uncertain = message["clock"]
            other = ranks[(ranks.index(rank) + 1) % len(ranks)]
            side = "ahead of" if lead >= 0 else "behind"
            parts.append(f"node {other} is {shown(abs(lead))} (± {shown(uncertain)}) {side} node {rank}")
            worst = max(worst, abs(lead) - uncertain)
    if worst > CLOCKS_S:
        return Check(
            "clocks", NOTE, "\n".join(parts), "nothing depends on them, but logs will look odd: use NTP"
        )
    return Check("clocks", OK, "\n".join(parts) or "not measured")


def _reach(said: Mapping[int, Message]) -> Iterator[Check]:
    cut = [
        f"node {rank} does not reach node {other} ({', '.join(said[int(other)]['about']['addresses'])})"
        for rank, message in said.items()
        for other, addresses in message["reached"].items()
        if not addresses
    ]
    if cut:
        advice = "updates of several nodes need it: open the nodes' ports to each other"
        yield Check("ports", WARNING, "\n".join(cut), advice)
        return
    used: dict[int, list[str]] = {
        rank: next(iter(m["reached"][str(rank)] for r, m in said.items() if str(rank) in m["reached"]), [])
        for rank in said
    }
    finding = ", ".join(f"node {rank} at {addresses[0]}" for rank, addresses in used.items() if addresses)
    yield Check("ports", OK, f"every node reaches every other: {finding}")


def _differences(said: Mapping[int, Message]) -> Iterator[Check]:
    packages = dict.fromkeys(name for message in said.values() for name in message["about"]["versions"])
    different = []
    for name in packages:
        there = {rank: message["about"]["versions"].get(name, "none") for rank, message in said.items()}
        if len(set(there.values())) > 1:
            different.append(f"{name}: {_each(there.items())}")
    if different:
        yield Check("versions", WARNING, "\n".join(different), "install the same on every node")
    else:
        versions = next(iter(said.values()))["about"]["versions"]
        yield Check(
            "versions", OK, "the same everywhere: " + ", ".join(f"{k} {v}" for k, v in versions.items())
        )
    accelerators = {rank: message["about"]["accelerators"] or "none" for rank, message in said.items()}
    if len(set(accelerators.values())) > 1:
        yield Check(
            "accelerators differ",
            WARNING,
            _each(accelerators.items()),
            "updates go at the slowest node's pace",
        )


def _each(items: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{value} on node {rank}" for rank, value in items)
