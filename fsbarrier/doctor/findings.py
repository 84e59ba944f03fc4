"""The doctor's results: single checks, the findings that nodes exchange, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from fsbarrier.doctor.messages import Message
from fsbarrier.host.mounts import Mount


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

    @classmethod
    def enough(cls, name: str, enough: bool, finding: str, advice: str) -> Check:
        """A check for a sufficient amount of something, with advice if it is not sufficient."""
        return cls(name, OK, finding) if enough else cls(name, WARNING, finding, advice)


@dataclass(frozen=True, slots=True)
class Times:
    """Durations in seconds: median, 99th percentile, maximum; `open`: the last one had not ended after `most`."""

    samples: int
    median: float
    p99: float
    most: float
    open: bool = False

    @classmethod
    def of(cls, seconds: Sequence[float], unfinished: float | None = None) -> Times | None:
        """Statistics of durations, including one that was abandoned after `unfinished` seconds; None if there are none."""
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
    """A duration as text."""
    return f"{1000 * seconds:.2f} ms" if abs(seconds) < 0.1 else f"{seconds:.2f} s"


@dataclass(slots=True)
class Races:
    """One node's part in the races: the rounds it won, its errors by name, the final content of each name, and whether the filesystem has
    hard links."""

    won: list[int] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    links: bool = True


@dataclass(slots=True)
class Reading:
    """What a reader saw of files that other nodes were replacing."""

    reads: int = 0
    torn: int = 0
    missing: int = 0
    backwards: int = 0


@dataclass(frozen=True, slots=True)
class About:
    """A description of a node."""

    host: str
    boot_id: str
    addresses: Sequence[str]
    versions: Mapping[str, str]
    accelerators: str
    mount: Mount


@dataclass(frozen=True, slots=True)
class NodeFindings:
    """The findings of one node. `clock`: lead of the next rank's clock, and its uncertainty; `reached`: the addresses at which each other
    node answers."""

    about: About
    checks: Sequence[Check]
    races: Races
    reading: Reading
    lags: Mapping[str, Times]
    clock: tuple[float, float] | None
    reached: Mapping[str, Sequence[str]]

    @staticmethod
    def of(message: Message) -> NodeFindings:
        """Rebuild from the JSON of `asdict`."""
        from pydantic import TypeAdapter

        return TypeAdapter(NodeFindings).validate_python(message)


#: findings by rank
Findings = Mapping[int, NodeFindings]


@dataclass(frozen=True, slots=True)
class Report:
    """All results. `category`: the class of filesystem; `stale_s`: maximum age of what a node sees; `proven`: how it was determined."""

    path: str
    category: str
    proven: str
    stale_s: float
    timeouts: Mapping[str, float]
    checks: tuple[Check, ...]
    nodes: tuple[Mapping[str, object], ...] = ()
    measured: Mapping[str, object] = field(default_factory=dict)

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
            "timeouts": dict(self.timeouts),
            "checks": [asdict(check) for check in self.checks],
            "nodes": [dict(node) for node in self.nodes],
            "measured": dict(self.measured),
        }
