"""How a node spent its time in a phase. The daemon writes it into the journal's `phase_finished`, and the views read it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsbarrier.protocol.facts import Payload
from fsbarrier.rundir.journal import number

#: the parts of a phase's time, in the order in which they occur
PARTS = ("start", "load", "work", "save", "wait")
#: Times are written to a tenth of a millisecond: a barrier takes some milliseconds.
DIGITS = 4


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds that add up to the whole phase.

    start_s  until the phase's program and its engine had started
    load_s   until the program had read its input
    work_s   the rest of the work
    save_s   writing the results
    wait_s   for the other nodes; before the node's own last work in the phase, and after it
    """

    start_s: float = 0.0
    load_s: float = 0.0
    work_s: float = 0.0
    save_s: float = 0.0
    wait_s: float = 0.0

    @classmethod
    def of_work(cls, worked_s: float, result: Mapping[str, object]) -> PhaseTime:
        """The parts of work that took `worked_s`. Programs and engines report the times of the parts in its `result`.

        A user's program may report anything, so the parts are limited to the whole.
        """
        left_s, parts = worked_s, []
        for names in (("engine_s", "start_s"), ("load_s",), ("save_s",)):
            reported_s = sum(number(result, name) or 0.0 for name in names)
            parts.append(min(max(0.0, reported_s), left_s))
            left_s -= parts[-1]
        start_s, load_s, save_s = parts
        return cls(start_s, load_s, left_s, save_s)

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> PhaseTime:
        """The reverse of `fields()`; invalid values are ignored."""
        return cls(*(max(0.0, number(fields, f"{part}_s") or 0.0) for part in PARTS))

    def fields(self) -> Payload:
        """The parts that took any time, as fields for the journal."""
        named = {f"{part}_s": round(seconds, DIGITS) for part, seconds in self.parts().items()}
        return {name: seconds for name, seconds in named.items() if seconds > 0}

    def parts(self) -> dict[str, float]:
        return dict(
            zip(PARTS, (self.start_s, self.load_s, self.work_s, self.save_s, self.wait_s), strict=True)
        )

    @property
    def seconds(self) -> float:
        return self.start_s + self.load_s + self.work_s + self.save_s + self.wait_s

    def within(self, seconds: float) -> PhaseTime:
        """The whole phase, which took `seconds`; the rest of the time was spent waiting."""
        return replace(self, wait_s=max(0.0, seconds - (self.seconds - self.wait_s)))
