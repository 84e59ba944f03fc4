"""Collects rewards, updates, lost nodes, failures and endings from a run's journals. Pure.

Several nodes report the same event (a lost node, a new generation). The history keeps one of these reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsbarrier.rundir.journal import FREQUENT, Event, lost_nodes
from fsbarrier.view.event_wording import event_text

#: the figure that tells how many updates are trained again if a node is lost now
AT_RISK = "updates_at_risk"
#: figures of the training -> the events that report them
FIGURES = {
    "loss": "updated",
    "entropy": "updated",
    **dict.fromkeys(("answer_tokens_mean", "segments_per_episode", "reasoning_share"), "rolled_out"),
    AT_RISK: "weights_published",
}
#: events that carry a phase's results
RESULTS = frozenset({"rolled_out", "evaluated", "batch_prepared", "updated", "weights_published"})
#: two reports of the same event within this many seconds count as one
SAME_S = 30.0
#: maximum number of events to keep
MAX_EVENTS = 20_000


@dataclass(frozen=True, slots=True)
class Rewards:
    """One iteration's mean rewards. `policy_version`: the policy that was rolled out and evaluated."""

    iteration: int
    train: float | None = None
    test: float | None = None
    policy_version: int | None = None
    trajectories: int | None = None


@dataclass(frozen=True, slots=True)
class Draws:
    """The training tasks of a run whose rollouts may end before all tasks are done, by what became of them.

    `counts`: (times drawn, times finished, number of tasks). `named`: the tasks that were drawn most often and never finished, by file and
    index.
    """

    counts: tuple[tuple[int, int, int], ...]
    named: tuple[str, ...]

    @property
    def tasks(self) -> int:
        return sum(tasks for _, _, tasks in self.counts)

    @property
    def never(self) -> int:
        """How many tasks were drawn and never finished."""
        return sum(tasks for _, finished, tasks in self.counts if not finished)


@dataclass
class RunHistory:
    """Collects the events of all journals. Events of different journals may arrive in any order."""

    #: (generation, node rank) -> why the node was lost
    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    #: `work_failed`, and the last `node_ended` of each rank
    failures: list[Event] = field(default_factory=list)
    endings: dict[int, Event] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    #: (iteration, event name) -> the newest report of the newest generation
    _results: dict[tuple[int, str], Event] = field(default_factory=dict)
    _last_report: dict[tuple[object, ...], float] = field(default_factory=dict)

    def feed(self, event: Event) -> bool:
        """Collect an event. Returns False if another node has just reported the same."""
        match event.name:
            case name if name in FREQUENT:
                return True
            case name if name in RESULTS:
                self._take_result(event)
            case "node_lost":
                self._take_loss(event)
            case "work_failed":
                self.failures.append(event)
            case "node_ended":
                self.endings[event.node_rank] = event
        is_news = self._is_news(event)
        if is_news:
            self.events.append(event)
            del self.events[:-MAX_EVENTS]
        return is_news

    def newest_events(self, most: int = MAX_EVENTS) -> list[Event]:
        """The events without duplicates and frequent ones, sorted by the writers' wall clocks."""
        return sorted(self.events[-most:], key=lambda event: event.at)

    def rewards(self) -> list[Rewards]:
        """The iterations that have a reward, in order."""
        rewards = [self._rewards(iteration) for iteration in sorted({key[0] for key in self._results})]
        return [reward for reward in rewards if reward.train is not None or reward.test is not None]

    def results(self) -> dict[int, list[Event]]:
        """iteration -> the newest report of each kind from its phases."""
        results: dict[int, list[Event]] = {}
        for (iteration, _), event in sorted(self._results.items()):
            results.setdefault(iteration, []).append(event)
        return results

    def reports(self, name: str) -> dict[int, Event]:
        """iteration -> the newest event of this name. The evaluation of a session's last policy counts for the iteration that would start
        from that policy."""
        return {key[0]: event for key, event in sorted(self._results.items()) if key[1] == name}

    def latest_figures(self) -> dict[str, float]:
        """The latest loss, entropy and figures of answers, and how many updates are trained again if a node is lost now, if any are."""
        figures: dict[str, float] = {}
        for field_name, name in FIGURES.items():
            values = [event.number(field_name) for event in self.reports(name).values()]
            reported = [value for value in values if value is not None]
            # A risk of 0 updates is not shown.
            if reported and (reported[-1] or field_name != AT_RISK):
                figures[field_name] = reported[-1]
        return figures

    def draws(self) -> Draws | None:
        """What became of the drawn tasks; None if rollouts wait for all of them."""
        newest = next(reversed(self.reports("rolled_out").values()), None)
        listed = newest.fields.get("draws") if newest is not None else None
        if newest is None or not isinstance(listed, list):
            return None
        counts = [tuple(row) for row in listed if isinstance(row, list) and len(row) == 3]
        if not all(type(number) is int for row in counts for number in row):
            return None
        return Draws(tuple(counts), newest.lines("never_finished"))

    def _rewards(self, iteration: int) -> Rewards:
        reports = [self._results.get((iteration, name)) for name in ("rolled_out", "evaluated")]
        train, test = (report.number("reward_mean") if report else None for report in reports)
        for report in reports:
            if report is not None:
                version, trajectories = report.integer("policy_version"), report.integer("trajectories")
                return Rewards(iteration, train, test, version, trajectories)
        return Rewards(iteration)

    def _take_result(self, event: Event) -> None:
        # A session evaluates its last policy at the end of its last iteration; see `reports`.
        iteration = event.iteration + (event.fields.get("final") is True)
        key = (iteration, event.name)
        old = self._results.get(key)
        if old is None or (old.generation, old.at) <= (event.generation, event.at):
            self._results[key] = event

    def _take_loss(self, event: Event) -> None:
        for node in lost_nodes(event):
            if node.node_rank is not None:
                self.losses.setdefault((event.generation, node.node_rank), node.why)

    def _is_news(self, event: Event) -> bool:
        """Whether no other node has just reported the same event."""
        key = (event.name, event.generation, *_subject(event))
        before = self._last_report.get(key)
        self._last_report[key] = event.at if before is None else max(before, event.at)
        return before is None or abs(event.at - before) > SAME_S


def _subject(event: Event) -> tuple[object, ...]:
    """A key that is equal for two nodes' reports of the same event."""
    match event.name:
        case "node_suspected" | "node_recovered":
            return (event.integer("suspect"),)
        case "node_lost":
            return tuple(node.node_rank for node in lost_nodes(event))
        case _:
            return (event_text(event) or (event.node_rank, event.iteration, event.phase),)
