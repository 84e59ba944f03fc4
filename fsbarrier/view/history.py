"""What a run's journals tell besides times: rewards, updates, who was lost, what failed, how it ended. Pure.

Several nodes report the same thing (a lost node, a new generation); it is told once here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsbarrier.view.lines import Line, integer, number, text

#: so frequent that only their times are kept (fsbarrier/view/timings.py)
FREQUENT = frozenset({"phase_started", "phase_finished", "work_finished", "iteration_finished", "decision"})
SAME_S = 30.0  # reports of one thing by several nodes lie less than this apart
MAX_EVENTS = 20_000  # newest kept


@dataclass(frozen=True)
class Rewards:
    """One iteration's mean rewards. `policy_version`: the policy that was rolled out and evaluated."""

    iteration: int
    train: float | None = None
    test: float | None = None
    policy_version: int | None = None
    trajectories: int | None = None


@dataclass(frozen=True)
class Loss:
    """A member that was found to be gone. `seen_at`: when, by the finder's clock, its last heartbeat was seen; None: unknown."""

    at: float
    generation: int
    node_rank: int
    host: str
    why: str
    seen_at: float | None = None


@dataclass(frozen=True)
class Failure:
    """A program that failed on a node; `log` is what it said last."""

    at: float
    generation: int
    node_rank: int
    iteration: int
    phase: int
    phase_name: str
    error: str
    log: tuple[str, ...]


@dataclass(frozen=True)
class Ending:
    """A node's own last word."""

    at: float
    node_rank: int
    state: str
    code: int | None
    reason: str


@dataclass
class History:
    """Takes lines in, in any order between journals, and keeps what people ask about."""

    results: dict[tuple[int, str], Line] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    endings: dict[int, Ending] = field(default_factory=dict)
    events: list[Line] = field(default_factory=list)
    _silent_since: dict[tuple[int, int], float] = field(default_factory=dict)
    _told: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def feed(self, line: Line) -> None:
        if line.event in FREQUENT:
            return
        if line.event == "node_lost":
            self._lost(line)
        elif line.event == "work_failed":
            self._failed(line)
        elif line.event == "node_ended":
            self.endings[line.node_rank] = Ending(
                line.at,
                line.node_rank,
                text(line.fields, "state"),
                integer(line.fields, "code"),
                text(line.fields, "reason"),
            )
        elif line.event == "node_suspected":
            rank, silent_s = integer(line.fields, "suspect"), number(line.fields, "silent_s")
            if rank is not None and silent_s is not None:
                self._silent_since[line.generation, rank] = line.at - silent_s
        elif line.event in RESULTS:
            self._result(line)
        if self._news(line):
            self.events.append(line)
            del self.events[:-MAX_EVENTS]

    def happenings(self, newest: int = MAX_EVENTS) -> list[Line]:
        """All but the frequent events, each thing once, in the order of the writers' wall clocks."""
        return sorted(self.events[-newest:], key=lambda line: line.at)

    def rewards(self) -> list[Rewards]:
        """The iterations that have a reward, in order."""
        iterations = sorted({iteration for iteration, event in self.results if event != "updated"})
        return [rewards for rewards in map(self._rewards, iterations) if rewards is not None]

    def updates(self) -> dict[int, Mapping[str, Any]]:
        """iteration -> what its update reported."""
        return {
            iteration: line.fields
            for (iteration, event), line in sorted(self.results.items())
            if event == "updated"
        }

    def _rewards(self, iteration: int) -> Rewards | None:
        train, test = self.results.get((iteration, "rolled_out")), self.results.get((iteration, "evaluated"))
        rewards = {
            name: number(line.fields, "reward_mean")
            for name, line in (("train", train), ("test", test))
            if line is not None
        }
        if all(value is None for value in rewards.values()):
            return None
        either = train if train is not None else test
        assert either is not None
        return Rewards(
            iteration,
            rewards.get("train"),
            rewards.get("test"),
            integer(either.fields, "policy_version"),
            integer(either.fields, "trajectories"),
        )

    def _result(self, line: Line) -> None:
        key = (line.iteration, line.event)
        old = self.results.get(key)
        if old is None or (old.generation, old.at) <= (line.generation, line.at):
            self.results[key] = line

    def _lost(self, line: Line) -> None:
        for item in lost_nodes(line):
            rank = integer(item, "node_rank")
            known = {(loss.generation, loss.node_rank) for loss in self.losses}
            if rank is not None and (line.generation, rank) not in known:
                seen_at = self._silent_since.get((line.generation, rank))
                self.losses.append(
                    Loss(line.at, line.generation, rank, text(item, "host"), text(item, "why"), seen_at)
                )

    def _failed(self, line: Line) -> None:
        log = line.fields.get("log")
        self.failures.append(
            Failure(
                line.at,
                line.generation,
                line.node_rank,
                line.iteration,
                line.phase,
                line.phase_name,
                text(line.fields, "error") or "failed",
                tuple(str(item) for item in log) if isinstance(log, list) else (),
            )
        )

    def _news(self, line: Line) -> bool:
        """Whether nobody told this just before."""
        key = (line.event, line.generation, *_subject(line))
        told = self._told.get(key)
        self._told[key] = line.at if told is None else max(told, line.at)
        return told is None or abs(line.at - told) > SAME_S


#: events that carry a phase's results
RESULTS = frozenset({"rolled_out", "evaluated", "updated", "weights_published"})


def _subject(line: Line) -> tuple[object, ...]:
    """What makes two nodes' reports of an event the same."""
    match line.event:
        case "node_suspected" | "node_recovered":
            return (integer(line.fields, "suspect"),)
        case "node_lost":
            return tuple(integer(item, "node_rank") for item in lost_nodes(line))
        case "generation_started" | "generation_proposed":
            return (integer(line.fields, "number"),)
        case "node_ended" if text(line.fields, "state") != "left":
            return (text(line.fields, "reason"),)
        case _:
            return line.node_rank, line.iteration, line.phase


def lost_nodes(line: Line) -> list[Mapping[str, Any]]:
    """The nodes that a `node_lost` names."""
    lost = line.fields.get("lost")
    return [item for item in lost if isinstance(item, Mapping)] if isinstance(lost, list) else []
