"""Combines the findings of several nodes into checks and a filesystem class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fsbarrier.doctor.between import LONGEST_S, ROUNDS, Findings
from fsbarrier.doctor.findings import NOTE, OK, REFUSED, SEVERITY, WARNING, Check, shown
from fsbarrier.doctor.probes import NEEDED, judge_races
from fsbarrier.store.mounts import CLOSE_TO_OPEN, COHERENT, INSTEAD

#: a mount that shows changes sooner than this counts as coherent; a longer delay makes barriers slow enough for a warning
FRESH_S, SLOW_S = 0.5, 2.0
#: people compare logs of different nodes by time: a larger difference of clocks is worth a note
CLOCKS_APART_S = 5.0
RACES = "exclusive-create races"
LABELS = {"content": "replaced file seen after", "listing": "new name listed after"}


def stale_s(findings: Findings) -> float:
    """The maximum age of what a node sees: a whole round trip, because one direction may have taken all of it."""
    every = [times.most for node in findings.values() for times in node.measured.lags.values()]
    return 2 * max(every, default=LONGEST_S)


def category_of(findings: Findings) -> str:
    """The filesystem class according to the measurements."""
    return COHERENT if stale_s(findings) < 2 * FRESH_S else CLOSE_TO_OPEN


def merged(checks: Mapping[int, Sequence[Check]]) -> list[Check]:
    """Merge the nodes' checks: identical findings become one line, the others name their node."""
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


def between_nodes(findings: Findings) -> list[Check]:
    """The checks between nodes."""
    return [
        *_races(findings),
        _reading(findings),
        *_delays(findings),
        _clocks(findings),
        _connections(findings),
        *_differences(findings),
    ]


def _races(findings: Findings) -> Iterator[Check]:
    parts = {rank: node.races for rank, node in findings.items()}
    errors = sum((Counter(part.errors) for part in parts.values()), Counter[str]())
    winners = Counter(number for part in parts.values() for number in part.won)
    if not winners:
        yield Check(RACES, REFUSED, f"no create succeeded ({', '.join(errors) or 'no error'})", NEEDED)
        return
    decided = range(max(winners) + 1)
    wins = [[int(number in part.won) for number in decided] for part in parts.values()]
    check = judge_races(RACES, wins, f"{len(parts)} nodes")
    winner = {number: f"node-{rank}" for rank, part in parts.items() for number in part.won}
    foreign = sum(
        any(part.records[number] not in ("", name) for part in parts.values())
        for number, name in winner.items()
    )
    if check.level == OK and foreign:
        finding = f"{foreign} of {ROUNDS} names contain a record that is not the winner's"
        check = Check(RACES, REFUSED, finding, "nodes could read different decisions; use another filesystem")
    elif check.level == OK and errors:
        counts = ", ".join(f"{count} x {error}" for error, count in errors.items())
        check = Check(RACES, WARNING, f"{check.finding}; errors: {counts}", "see the server's log")
    yield check


def _reading(findings: Findings) -> Check:
    reads, torn, backwards = (
        sum(getattr(node.measured, name) for node in findings.values())
        for name in ("reads", "torn", "backwards")
    )
    finding = f"{reads} reads of files that other nodes replaced: {torn} torn, {backwards} older than an earlier read"
    advice = "safe, because records have digests and are read again, but slower"
    if torn or backwards:
        return Check("replace under readers", WARNING, finding, advice)
    return Check("replace under readers", OK, finding)


def _delays(findings: Findings) -> Iterator[Check]:
    fresher = "; ".join(dict.fromkeys(node.about.fresher for node in findings.values()))
    for kind, label in LABELS.items():
        every = [node.measured.lags[kind] for node in findings.values() if kind in node.measured.lags]
        if not every:
            yield Check(label, REFUSED, "not measured: writing failed", INSTEAD)
            continue
        worst = max(every, key=lambda times: (times.open, times.most))
        median = sorted(times.median for times in every)[len(every) // 2]
        p99, samples = max(times.p99 for times in every), sum(times.samples for times in every)
        most = f"{'not within' if worst.open else 'most'} {shown(worst.most)}"
        finding = f"median {shown(median)}, 99th {shown(p99)}, {most} ({samples} times)"
        if worst.open and worst.most > LONGEST_S / 3:
            what = "what other nodes write" if kind == "content" else "other nodes' heartbeats and records"
            yield Check(label, REFUSED, f"{finding}: {what} would not become visible", fresher)
        elif worst.most >= SLOW_S:
            each = ": every barrier takes this long" if kind == "listing" else ""
            yield Check(label, WARNING, finding + each, fresher)
        else:
            yield Check(label, OK, finding)


def _clocks(findings: Findings) -> Check:
    first = min(findings)
    leads = findings[first].measured.clock_leads
    worst = max((abs(lead) - uncertain for lead, uncertain in leads.values()), default=0.0)
    finding = "\n".join(
        f"node {rank} is {shown(abs(lead))} (± {shown(uncertain)}) {'ahead of' if lead >= 0 else 'behind'} node {first}"
        for rank, (lead, uncertain) in leads.items()
    )
    if worst > CLOCKS_APART_S:
        advice = "runs do not depend on clocks, but timestamps in logs will be out of order; use NTP"
        return Check("clocks", NOTE, finding, advice)
    return Check("clocks", OK, finding or "not measured")


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


def _differences(findings: Findings) -> Iterator[Check]:
    abouts = {rank: node.about for rank, node in findings.items()}
    names = dict.fromkeys(name for about in abouts.values() for name in about.versions)
    installed = {name: {r: about.versions.get(name, "none") for r, about in abouts.items()} for name in names}
    different = [f"{name}: {_each(each)}" for name, each in installed.items() if len(set(each.values())) > 1]
    if different:
        yield Check("versions", WARNING, "\n".join(different), "install the same versions on every node")
    else:
        same = ", ".join(f"{name} {next(iter(each.values()))}" for name, each in installed.items())
        yield Check("versions", OK, f"the same everywhere: {same}")
    accelerators = {rank: about.accelerators or "none" for rank, about in abouts.items()}
    if len(set(accelerators.values())) > 1:
        advice = "updates run at the speed of the slowest node"
        yield Check("accelerators differ", WARNING, _each(accelerators), advice)
    if len({about.boot_id for about in abouts.values()}) == 1:
        finding = f"all {len(findings)} nodes are on one host, so visibility between hosts was not tested"
        yield Check("hosts", NOTE, finding, "run doctor on the nodes of the run")


def _each(by_rank: Mapping[int, str]) -> str:
    return ", ".join(f"{value} on node {rank}" for rank, value in by_rank.items())
