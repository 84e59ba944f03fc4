"""Draws the conclusions: what several nodes measured becomes lines, a class, timeouts, and a refusal where there must be one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple

from fsbarrier.doctor.delays import CHANNELS, LONGEST_S
from fsbarrier.doctor.findings import (
    NOTE,
    OK,
    REFUSED,
    SEVERITY,
    WARNING,
    Check,
    NodeFindings,
    Races,
    Reading,
    shown,
)
from fsbarrier.doctor.probes import NEEDED, judge_races
from fsbarrier.doctor.races import ROUNDS
from fsbarrier.machine.mounts import CLOSE_TO_OPEN, COHERENT, INSTEAD
from fsbarrier.protocol.timing import BEAT_S, DEAD_S, SUSPECT_S

#: what is shown sooner than this needs no longer timeouts
FRESH_S = 0.5
#: above this, barriers are so slow that it is worth a warning
SLOW_S = 2.0
#: above this, the times in the nodes' logs do not fit together
CLOCKS_S = 5.0
RACE_NAMES = {"link": "hard-link races", "create": "exclusive-create races"}

#: what each node found, by rank
Findings = Mapping[int, NodeFindings]


def timeouts(stale_s: float) -> dict[str, float]:
    """The settings that fit a mount on which what a node sees may be `stale_s` seconds old."""
    late = round(stale_s + 0.5) if stale_s >= FRESH_S else 0
    return {
        "coordination.beat_s": BEAT_S,
        "coordination.suspect_s": SUSPECT_S + late,
        "coordination.dead_s": DEAD_S + 4 * late,
    }


def stale_s(findings: Findings) -> float:
    """How old what a node sees may be: a whole round trip, as one way may have taken all of it."""
    waited_for = [
        times for node in findings.values() for kind, times in node.lags.items() if kind != "absent"
    ]
    return max((2 * times.most for times in waited_for), default=2 * LONGEST_S)


def category_of(findings: Findings) -> str:
    """The class that the measurements speak for."""
    every = [times.most for node in findings.values() for times in node.lags.values()]
    return COHERENT if every and max(every) < FRESH_S else CLOSE_TO_OPEN


def merged(checks: Mapping[int, Sequence[Check]]) -> list[Check]:
    """Each node's lines as one list: what all say alike is one line, the rest says who."""
    by_name: dict[str, dict[int, list[Check]]] = {}
    for rank, own in checks.items():
        for check in own:
            by_name.setdefault(check.name, {}).setdefault(rank, []).append(check)
    found = []
    for name, by_rank in by_name.items():
        every = [check for own in by_rank.values() for check in own]
        level = max((check.level for check in every), key=SEVERITY.__getitem__)
        texts = {rank: "; ".join(check.finding for check in own) for rank, own in by_rank.items()}
        if len(set(texts.values())) == 1 and len(texts) == len(checks):
            finding = next(iter(texts.values()))
        else:
            finding = "\n".join(f"node {rank}: {text}" for rank, text in texts.items())
        advice = "; ".join(dict.fromkeys(check.advice for check in every if check.advice))
        found.append(Check(name, level, finding, advice))
    return found


# --- between nodes --------------------------------------------------------------------------------------------------------


def between(findings: Findings, fresher: str) -> list[Check]:
    """The lines about what only several nodes can tell. `fresher`: the mount options that make this filesystem so."""
    return [
        *_races(findings),
        _reading(findings),
        *_lags(findings, fresher),
        _clocks(findings),
        _ports(findings),
        *_differences(findings),
        *_hosts(findings),
    ]


def _races(findings: Findings) -> Iterator[Check]:
    parts = {kind: {rank: node.races[kind] for rank, node in findings.items()} for kind in RACE_NAMES}
    failed = {kind: _all_failed(by_rank) for kind, by_rank in parts.items()}
    for kind, name in RACE_NAMES.items():
        if not failed[kind]:
            yield _race(name, parts[kind])
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


def _race(name: str, parts: Mapping[int, Races]) -> Check:
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


def _reading(findings: Findings) -> Check:
    name, every = "replace under readers", [astuple(node.reading) for node in findings.values()]
    total = Reading(*map(sum, zip(*every, strict=True)))
    finding = (
        f"{total.reads} reads of files that others replaced: {total.torn} torn, {total.missing} missing, "
        f"{total.backwards} older than before"
    )
    if total.torn or total.backwards:
        return Check(name, WARNING, finding, "records carry digests and are read again: slower")
    return Check(name, NOTE if total.missing else OK, finding)


def _lags(findings: Findings, fresher: str) -> Iterator[Check]:
    for kind, channel in CHANNELS.items():
        every, label = [node.lags[kind] for node in findings.values() if kind in node.lags], channel.label
        if not every:
            yield Check(label, REFUSED, "not measured: nothing could be written", INSTEAD)
            continue
        worst = max(every, key=lambda times: (times.open, times.most))
        median = sorted(times.median for times in every)[len(every) // 2]
        p99, samples = max(times.p99 for times in every), sum(times.samples for times in every)
        most = f"{'not within' if worst.open else 'most'} {shown(worst.most)}"
        finding = f"median {shown(median)}, 99th {shown(p99)}, {most} ({samples} half round trips)"
        if kind == "absent":
            late = worst.open or worst.most >= FRESH_S
            yield Check(label, NOTE if late else OK, finding + ("; nothing waits that way" if late else ""))
        elif worst.open:
            what = "a node's heartbeat" if kind == "content" else "what a node has done"
            yield Check(label, REFUSED, f"{finding}: {what} would not be seen", fresher)
        elif worst.most >= SLOW_S:
            each = ": each barrier takes that long" if kind == "listing" else ""
            yield Check(label, WARNING, finding + each, fresher)
        else:
            yield Check(label, OK, finding)


def _clocks(findings: Findings) -> Check:
    ranks, parts, worst = list(findings), [], 0.0
    for rank, following in zip(ranks, [*ranks[1:], *ranks[:1]], strict=True):
        if (clock := findings[rank].clock) is not None:
            lead, uncertain = clock
            side = "ahead of" if lead >= 0 else "behind"
            parts.append(f"node {following} is {shown(abs(lead))} (± {shown(uncertain)}) {side} node {rank}")
            worst = max(worst, abs(lead) - uncertain)
    if worst > CLOCKS_S:
        advice = "nothing depends on them, but logs will look odd: use NTP"
        return Check("clocks", NOTE, "\n".join(parts), advice)
    return Check("clocks", OK, "\n".join(parts) or "not measured")


def _ports(findings: Findings) -> Check:
    cut = [
        f"node {rank} does not reach node {other} ({', '.join(findings[int(other)].about.addresses)})"
        for rank, node in findings.items()
        for other, addresses in node.reached.items()
        if not addresses
    ]
    if cut:
        advice = "updates of several nodes need it: open the nodes' ports to each other"
        return Check("ports", WARNING, "\n".join(cut), advice)
    # For each node the address at which the first of the others reached it.
    used: dict[int, str] = {}
    for node in findings.values():
        for other, addresses in node.reached.items():
            used.setdefault(int(other), addresses[0])
    finding = ", ".join(f"node {rank} at {address}" for rank, address in sorted(used.items()))
    return Check("ports", OK, f"every node reaches every other: {finding}")


def _differences(findings: Findings) -> Iterator[Check]:
    abouts = {rank: node.about for rank, node in findings.items()}
    names = dict.fromkeys(name for about in abouts.values() for name in about.versions)
    installed = {name: {r: about.versions.get(name, "none") for r, about in abouts.items()} for name in names}
    different = [f"{name}: {_each(each)}" for name, each in installed.items() if len(set(each.values())) > 1]
    if different:
        yield Check("versions", WARNING, "\n".join(different), "install the same on every node")
    else:
        same = ", ".join(f"{name} {next(iter(each.values()))}" for name, each in installed.items())
        yield Check("versions", OK, f"the same everywhere: {same}")
    accelerators = {rank: about.accelerators or "none" for rank, about in abouts.items()}
    if len(set(accelerators.values())) > 1:
        advice = "updates go at the slowest node's pace"
        yield Check("accelerators differ", WARNING, _each(accelerators), advice)


def _each(by_rank: Mapping[int, str]) -> str:
    return ", ".join(f"{value} on node {rank}" for rank, value in by_rank.items())


def _hosts(findings: Findings) -> Iterator[Check]:
    if len({node.about.boot_id for node in findings.values()}) == 1:
        finding = f"all {len(findings)} nodes are on one host: what other hosts see is not proven"
        yield Check("hosts", NOTE, finding, "start doctor on the nodes that will run")
