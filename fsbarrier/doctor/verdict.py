"""Combines the measurements of several nodes into checks, a filesystem class and timeouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fsbarrier.doctor import connections, delays, races, readers
from fsbarrier.doctor.delays import FRESH_S, LONGEST_S
from fsbarrier.doctor.findings import NOTE, OK, SEVERITY, WARNING, Check, Findings
from fsbarrier.host.mounts import CLOSE_TO_OPEN, COHERENT
from fsbarrier.protocol.timing import BEAT_S, DEAD_S, SUSPECT_S


def timeouts(stale_s: float) -> dict[str, float]:
    """The timeouts for a mount on which reads may be `stale_s` seconds old."""
    late = round(stale_s + 0.5) if stale_s >= FRESH_S else 0
    return {
        "coordination.beat_s": BEAT_S,
        "coordination.suspect_s": SUSPECT_S + late,
        "coordination.dead_s": DEAD_S + 4 * late,
    }


def stale_s(findings: Findings) -> float:
    """The maximum age of what a node sees: a whole round trip, because one direction may have taken all of it."""
    waited_for = [
        times for node in findings.values() for kind, times in node.lags.items() if kind != "absent"
    ]
    return max((2 * times.most for times in waited_for), default=2 * LONGEST_S)


def category_of(findings: Findings) -> str:
    """The filesystem class according to the measurements."""
    every = [times.most for node in findings.values() for times in node.lags.values()]
    return COHERENT if every and max(every) < FRESH_S else CLOSE_TO_OPEN


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


def between(findings: Findings, fresher: str) -> list[Check]:
    """The checks between nodes. `fresher`: advice on mount options that reduce delays."""
    return [
        *races.judge(findings),
        readers.judge(findings),
        *delays.judge(findings, fresher),
        delays.judge_clocks(findings),
        connections.judge(findings),
        *_differences(findings),
        *_hosts(findings),
    ]


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


def _each(by_rank: Mapping[int, str]) -> str:
    return ", ".join(f"{value} on node {rank}" for rank, value in by_rank.items())


def _hosts(findings: Findings) -> Iterator[Check]:
    if len({node.about.boot_id for node in findings.values()}) == 1:
        finding = f"all {len(findings)} nodes are on one host, so visibility between hosts was not tested"
        yield Check("hosts", NOTE, finding, "run doctor on the nodes of the run")
