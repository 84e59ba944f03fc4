"""What the doctor says: one line a check, and a report of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LEVELS = ("ok", "note", "warning", "refused")


@dataclass(frozen=True)
class Check:
    """One line of the report. `level`: ok, note, warning or refused; `node`: the rank that found it, None for all."""

    name: str
    level: str
    finding: str
    advice: str = ""
    node: int | None = None


@dataclass(frozen=True)
class Times:
    """Durations in seconds: median, 99th percentile, longest; `open`: the last had not ended after `most`."""

    samples: int
    median: float
    p99: float
    most: float
    open: bool = False

    @classmethod
    def of(cls, seconds: Sequence[float], unfinished: float | None = None) -> Times | None:
        """The figures of several durations, and of one that was given up after `unfinished` seconds; None for none."""
        every = sorted([*seconds, *([unfinished] if unfinished is not None else [])])
        if not every:
            return None
        last = len(every) - 1
        cut_off = unfinished is not None and unfinished >= every[-1]
        return cls(len(every), every[len(every) // 2], every[round(0.99 * last)], every[-1], cut_off)

    def __str__(self) -> str:
        most = f"{'more than' if self.open else 'most'} {shown(self.most)}"
        return f"median {shown(self.median)}, 99th {shown(self.p99)}, {most}"


def shown(seconds: float) -> str:
    """A duration as people read it."""
    return f"{1000 * seconds:.2f} ms" if abs(seconds) < 0.1 else f"{seconds:.2f} s"


@dataclass(frozen=True)
class Report:
    """The whole answer. `kind`: the class of filesystem; `stale_s`: how old what a node sees may be; `proven`: by whom."""

    path: str
    kind: str
    proven: str
    stale_s: float
    timeouts: Mapping[str, float]
    checks: tuple[Check, ...]
    nodes: tuple[Mapping[str, Any], ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.level == "refused")

    def as_json(self) -> dict[str, Any]:
        """For programs: `fit` says whether the directory can carry a run."""
        checks = [{k: v for k, v in asdict(check).items() if v is not None} for check in self.checks]
        return {
            "path": self.path,
            "fit": not self.refused,
            "class": self.kind,
            "proven": self.proven,
            "staleness_s": self.stale_s,
            "timeouts": dict(self.timeouts),
            "checks": checks,
            "nodes": [dict(node) for node in self.nodes],
            "measured": dict(self.measured),
        }
