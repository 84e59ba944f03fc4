"""Judges what the members of a group have seen (group_fuzz.py), and knows nothing of how groups work.

A line is what one member wrote down: that it began a call, how the call ended, or of which generation it is a member.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: errors that a group's call may raise
TYPED = ("PeerLost", "BarrierTimeout", "Fenced", "OutOfStep", "StoreError")
#: by how much a call may outlast its time on a machine under any load
LOAD_S = 120.0
Line = dict[str, Any]


def timing(nodes: int) -> dict[str, float]:
    """How `fsbarrier.join` is called: slower for many processes on one machine."""
    beat_s = 0.2 if nodes <= 8 else 0.5 if nodes <= 24 else 1.0
    return {"beat_s": beat_s, "suspect_s": 5 * beat_s, "dead_s": 12 * beat_s, "timeout_s": 30 * beat_s}


def filling(origin: list[int], size: int) -> str:
    """What a member adds, so that a mixture of two values cannot pass for one."""
    text = str(origin)
    return (text * (size // len(text) + 1))[:size]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(folder: Path) -> list[Line]:
    """What all members have written, each line with the file that it is from; a torn last line is left out."""
    found = []
    for path in sorted((folder / "seen").iterdir()):
        for line in path.read_text().split("\n")[:-1]:
            found.append({**json.loads(line), "by": path.stem})
    return found


def judge(seen: Iterable[Line]) -> list[str]:
    """What is wrong with what the members saw."""
    lines = list(seen)
    return [
        *_one_membership(lines),
        *_one_result(lines),
        *_all_had_begun(lines),
        *_typed_errors(lines),
        *_only_forward(lines),
    ]


def _one_membership(lines: list[Line]) -> Iterable[str]:
    members: dict[int, Any] = {}
    for line in lines:
        if (
            line["what"] in ("member", "end")
            and members.setdefault(line["g"], line["members"]) != line["members"]
        ):
            yield f"generation {line['g']} has members {members[line['g']]} and, to {line['by']}, {line['members']}"


def _one_result(lines: list[Line]) -> Iterable[str]:
    """Whoever completed the same call got the same, and what each gave to it. Of members that made different calls, not all complete."""
    given = {tuple(line["origin"]): line for line in lines if line["what"] == "begin" and "origin" in line}
    results: dict[tuple[int, int, str, int], Line] = {}
    completed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for line in lines:
        if line["what"] == "another":
            yield f"{line['by']}: after {line['expected']} another call gave {line['said']}"
        if line["what"] != "end":
            continue
        where = line["g"], line["n"]
        first = results.setdefault((*where, line["call"], line["src"]), line)
        completed[where].add(line["rank"])
        if _said(first) != _said(line):
            yield f"call {where}: {first['by']} got {_said(first)}, {line['by']} got {_said(line)}"
        wanted = [line["src"]] if line["call"] == "broadcast" else line["members"] if line["got"] else []
        if [origin[0] for origin, _ in line["got"]] != wanted:
            yield f"call {where}: {line['by']} got what {[origin[0] for origin, _ in line['got']]} gave, not {wanted}"
        for origin, found in line["got"]:
            gave = given.get(tuple(origin))
            if gave is None or (gave["g"], gave["n"], gave["call"], gave["src"]) != (
                *where,
                line["call"],
                line["src"],
            ):
                yield f"call {where}: {line['by']} got what was given to another call: {origin}"
            elif digest(filling(origin, gave["size"])) != found:
                yield f"call {where}: {line['by']} got something else than {origin} gave"
    members = {line["g"]: {*line["members"]} for line in lines if line["what"] == "end"}
    for where, ranks in completed.items():
        calls = {key[2:] for key in results if key[:2] == where}
        if len(calls) > 1 and ranks == members[where[0]]:
            yield f"call {where}: all completed it, as {calls}"


def _said(line: Line) -> Any:
    return line["call"], line["src"], line["got"]


def _all_had_begun(lines: list[Line]) -> Iterable[str]:
    """All processes share one clock here."""
    begun: dict[tuple[int, int, int], Line] = {}
    for line in lines:
        if line["what"] == "begin":
            begun.setdefault((line["g"], line["n"], line["rank"]), line)
    for line in lines:
        for rank in line["members"] if line["what"] == "end" else ():
            other = begun.get((line["g"], line["n"], rank))
            if other is None or other["t"] > line["t"]:
                what = "nothing" if other is None else f"{other['call']} {other['src']} at {other['t']}"
                yield f"{line['by']} completed {line['call']} ({line['g']}, {line['n']}) at {line['t']}; node {rank} had begun {what}"


def _typed_errors(lines: list[Line]) -> Iterable[str]:
    """Every call ended in time, and what it raised names a node."""
    ranks = {line["rank"] for line in lines}
    most_s = 2 * timing(len(ranks))["timeout_s"] + LOAD_S
    for line in lines:
        where = f"{line['by']}, {line.get('call')} ({line.get('g')}, {line.get('n')})"
        # A node that never came has no host.
        unnamed = line["what"] == "error" and not line["host"] and line["call"] != "join"
        if line["what"] == "error" and (line["error"] not in TYPED or line["whom"] not in ranks or unnamed):
            yield f"{where}: {line['error']} names {line['whom']} on {line['host']}: {line['message']}"
        if line["what"] in ("end", "error") and line["seconds"] > most_s:
            yield f"{where}: ended after {line['seconds']:.1f} s"


def _only_forward(lines: list[Line]) -> Iterable[str]:
    """No membership completes a call twice, or one before another that it completed."""
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for line in lines:
        if line["what"] == "end":
            membership, here = (line["by"], line["joined"]), (line["g"], line["n"])
            if here <= last.get(membership, (0, -1)):
                yield f"{line['by']} completed {here} after {last[membership]}"
            last[membership] = here
