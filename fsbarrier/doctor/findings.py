"""The doctor's results: single checks, durations, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding, from good to bad. A directory with a `refused` finding cannot support a run."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    REFUSED = "refused"


OK, NOTE, WARNING, REFUSED = Level
SEVERITY = {level: number for number, level in enumerate(Level)}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    level: Level
    finding: str
    advice: str = ""

    @property
    def with_advice(self) -> str:
        """The finding, and what to do about it."""
        return f"{self.finding}; {self.advice}" if self.advice else self.finding

    @classmethod
    def enough(cls, name: str, enough: bool, finding: str, advice: str) -> Check:
        """A check for a sufficient amount of something, with advice if it is not sufficient."""
        return cls(name, OK, finding) if enough else cls(name, WARNING, finding, advice)


@dataclass(frozen=True, slots=True)
class Times:
    """Durations in seconds: median, maximum; `open`: the last one had not ended after `most`."""

    samples: int
    median: float
    most: float
    open: bool = False

    @classmethod
    def of(cls, seconds: Sequence[float], unfinished: float = 0.0) -> Times | None:
        """Statistics of durations; `unfinished`: one that was still going on after this time. None if there are none."""
        every = sorted([*seconds, *([unfinished] if unfinished else [])])
        if not every:
            return None
        return cls(len(every), every[len(every) // 2], every[-1], 0 < unfinished == every[-1])


def shown(seconds: float) -> str:
    """A duration as text."""
    return f"{1000 * seconds:.2f} ms" if abs(seconds) < 0.1 else f"{seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Report:
    """All results. `category`: the class of filesystem; `stale_s`: maximum age of what a node sees; `proven`: how it was determined."""

    path: str
    category: str
    proven: str
    stale_s: float
    checks: tuple[Check, ...]
    nodes: tuple[Mapping[str, object], ...] = ()

    @property
    def refused(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.level == REFUSED)

    def as_json(self) -> dict[str, object]:
        """The report as JSON. `fit`: whether the directory can support a run."""
        return {
            "path": self.path,
            "fit": not self.refused,
            "class": self.category,
            "proven": self.proven,
            "staleness_s": self.stale_s,
            "checks": [asdict(check) for check in self.checks],
            "nodes": [dict(node) for node in self.nodes],
        }
