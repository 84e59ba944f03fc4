"""Decides what follows a failed program: another attempt, a generation without the nodes where it cannot work, or the run's end. Pure.

An iteration is attempted up to `retries` + 1 times. A program that fails twice in the same way is not tried again, since it would
probably fail a third time. Each generation's record has the failures of its iteration so far, so all nodes draw the same conclusion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.protocol.facts import Fact, FailedProgram, Generation, Member, Position, Verdict
from fsbarrier.protocol.situation import Situation
from fsbarrier.protocol.succession import successor
from fsbarrier.wording import counted

#: the longest pause before another attempt
MOST_PAUSE_S = 60.0
#: The first characters of two messages are compared without numbers, since pids, ports and generations differ each time.
_COMPARED, _NUMBER = 200, re.compile(r"0x[0-9a-f]+|\d+")


def failures_so_far(generation: Generation, position: Position) -> tuple[FailedProgram, ...]:
    """The failures of the iteration at `position` before this generation; a record has only those of its first iteration."""
    return generation.failures if position.iteration == generation.start.iteration else ()


def pause_s(situation: Situation, attempt: int) -> float:
    """How long to wait before another attempt after `attempt` failed ones."""
    return float(min(situation.rules.limits.stagger_s * 2**attempt, MOST_PAUSE_S))


def after_a_failure(situation: Situation) -> Generation:
    """The generation that follows the failures in this node's row."""
    before, members = failures_so_far(situation.generation, situation.position), situation.generation.members
    attempt = 1 + max((failure.attempt for failure in before), default=0)
    failures = (*before, *_failures(situation, attempt))
    shown = _first(situation)
    cause, log = _described(situation, shown)
    if shown.value.get("refused"):
        code = shown.value.get("exit_code", UsageError.exit_code)
        return successor(situation, members, "refused", verdict=Verdict(code, f"{cause}{log}"))
    repeated = _repeated(before, failures[len(before) :])
    if attempt <= situation.rules.retries and not repeated:
        return successor(situation, members, f"again: {cause}", failures=failures)
    tries = f"{counted(attempt, 'attempt')}{', as it failed in the same way before' if repeated else ''}"
    unable = _cannot_work(situation, failures, attempt)
    if unable:
        who = ", ".join(f"node {member.rank} ({member.host})" for member in unable)
        rest = [member for member in members if member not in unable]
        # The remaining nodes start again at attempt 1. If one of them fails like those that left, the run ends.
        kept = tuple(replace(failure, attempt=0) for failure in failures)
        reason = f"{who} cannot work and leaves: {cause}; given up after {tries}"
        return successor(situation, rest, reason, failures=kept, dismissed=tuple(unable))
    code = shown.value.get("exit_code", ProgramFailed.exit_code)
    verdict = Verdict(code, f"{cause}; given up after {tries}{log}")
    return successor(situation, members, "program failed", verdict=verdict)


def _failures(situation: Situation, attempt: int) -> list[FailedProgram]:
    return [
        FailedProgram(
            attempt=attempt,
            rank=rank,
            phase=situation.row.index,
            what=_NUMBER.sub("#", str(fact.value.get("error", "")))[:_COMPARED],
            noticed=fact.value.get("noticed") is True,
        )
        for rank, fact in sorted(situation.view.failed.items())
    ]


def _first(situation: Situation) -> Fact:
    """The failure to show: the lowest rank's, but preferably one that is no consequence of another node's failure."""
    failed = situation.view.failed.values()
    return min(failed, key=lambda fact: (fact.value.get("noticed") is True, fact.rank))


def _described(situation: Situation, fact: Fact) -> tuple[str, str]:
    """A failure as one line of text, and the last lines of its program's log."""
    host = next((m.host for m in situation.generation.members if m.rank == fact.rank), "")
    iteration, row = situation.position.iteration, situation.row
    where = f"node {fact.rank} ({host}), iteration {iteration}, phase {row.index} {row.name}"
    log = "".join(f"\n  | {line}" for line in fact.value.get("log", ()))
    return f"{where}: {fact.value.get('error', 'failed')}", log


def _repeated(before: Sequence[FailedProgram], new: Sequence[FailedProgram]) -> bool:
    """Whether a program failed as one failed before, on any node. A lost partner does not count: it comes back or is replaced."""
    known = {(failure.phase, failure.what) for failure in before if not failure.noticed}
    return any((failure.phase, failure.what) in known for failure in new if not failure.noticed)


def _cannot_work(situation: Situation, failures: Sequence[FailedProgram], attempts: int) -> list[Member]:
    """The members that failed in each attempt, with no message that a member had whose program worked in some attempt; none if the run
    cannot go on without them."""
    direct = [failure for failure in failures if not failure.noticed]
    failed_in = [
        {failure.rank for failure in direct if failure.attempt == number} for number in range(1, attempts + 1)
    ]
    failed_each_time = set.intersection(*failed_in)
    messages_of_others = {failure.what for failure in direct if failure.rank not in failed_each_time}
    unable = [
        member
        for member in situation.generation.members
        if member.rank in failed_each_time
        and not any(failure.rank == member.rank and failure.what in messages_of_others for failure in direct)
    ]
    remaining = [member.rank for member in situation.generation.members if member not in unable]
    rules = situation.rules
    return unable if rules.on_node_failure == "shrink" and remaining and not rules.lacks(remaining) else []
