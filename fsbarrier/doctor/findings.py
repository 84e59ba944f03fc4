"""What the doctor says: one line a check, what each node found and tells the others, and the report of all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from fsbarrier.doctor.messages import Message
from fsbarrier.host.mounts import Mount


class Level(StrEnum):
    """How bad a finding is, from good to bad; a directory with a refused one cannot carry a run."""

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
        """A line about something of which there should be enough; the advice is for where there is not."""
        return cls(name, OK, finding) if enough else cls(name, WARNING, finding, advice)


@dataclass(frozen=True, slots=True)
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


@dataclass(slots=True)
class Races:
    """One node's part in the races: the rounds that it seemed to win, its errors by name, what each name held in the end, and whether the
    filesystem has hard links."""

    won: list[int] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    links: bool = True


@dataclass(slots=True)
class Reading:
    """What a reader saw of files that other nodes replaced under it."""

    reads: int = 0
    torn: int = 0
    missing: int = 0
    backwards: int = 0


@dataclass(frozen=True, slots=True)
class About:
    """What a node is."""

    host: str
    boot_id: str
    addresses: Sequence[str]
    versions: Mapping[str, str]
    accelerators: str
    mount: Mount


@dataclass(frozen=True, slots=True)
class NodeFindings:
    """All that one of several nodes found. `clock`: how far the next rank's is ahead, and how uncertain that is; `reached`: the
    addresses at which each other node answers."""

    about: About
    checks: Sequence[Check]
    races: Races
    reading: Reading
    lags: Mapping[str, Times]
    clock: tuple[float, float] | None
    reached: Mapping[str, Sequence[str]]

    @staticmethod
    def of(message: Message) -> NodeFindings:
        """From what `asdict` and JSON made of one."""
        from pydantic import TypeAdapter

        return TypeAdapter(NodeFindings).validate_python(message)


#: what each node found, by rank
Findings = Mapping[int, NodeFindings]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole answer. `category`: the class of filesystem; `stale_s`: how old what a node sees may be; `proven`: by whom."""

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
        """For programs: `fit` says whether the directory can carry a run."""
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
