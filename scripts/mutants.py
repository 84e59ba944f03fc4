"""Does the proof notice a broken protocol? Puts one deliberate fault after another into it (mutant_list.py) and sees what finds it.

    python scripts/mutants.py                 all of them; the table goes into docs/proof.md
    python scripts/mutants.py never_dead ...  some of them; nothing is written

Exit code 1 where one survives.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mutant_list import MUTANTS, Mutant  # noqa: E402

from fsbarrier.sim.campaign import judge  # noqa: E402
from fsbarrier.sim.faults import parse_mix  # noqa: E402
from fsbarrier.sim.invariants import budget, i12_operations  # noqa: E402
from fsbarrier.sim.scenario import play  # noqa: E402
from fsbarrier.sim.setup import Setup  # noqa: E402
from fsbarrier.sim.world import World  # noqa: E402

PAGE = ROOT / "docs" / "proof.md"
BEGIN, END = "<!-- mutants: written by scripts/mutants.py -->", "<!-- mutants end -->"


class Caught(NamedTuple):
    """What found a mutant: the invariants that failed, and where."""

    invariants: frozenset[str]
    by: str
    seed: int = -1


class Changes:
    """Attributes and items that are changed for a while."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, Any, Any, bool]] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        self._undo.append((target, name, target.__dict__[name], False))
        setattr(target, name, value)

    def setitem(self, target: Any, name: str, value: Any) -> None:
        self._undo.append((target, name, target[name], True))
        target[name] = value

    def undo(self) -> None:
        while self._undo:
            target, name, value, item = self._undo.pop()
            target.__setitem__(name, value) if item else setattr(target, name, value)


def hunt(mutant: Mutant) -> Caught | None:
    """What finds this mutant, which has been put in, by an invariant that it is meant to break; None if nothing does."""
    if mutant.counted:
        world = World(0, Setup(nodes=24, mix=frozenset(), phases="both", policy="shrink", lengths=(0.01,)))
        world.run()
        spent = i12_operations(world.history)
        return (
            Caught(frozenset({"I12"}), f"{spent:.1f} operations a node and row")
            if spent > budget(24)
            else None
        )
    if mutant.story:
        text = (ROOT / "tests" / "scenarios" / f"{mutant.story}.txt").read_text()
        _, broken = play(text.partition("----")[0])
        return Caught(frozenset(v.number for v in broken), f"story {mutant.story}") if broken else None
    for seed in range(mutant.seeds):
        found = broken_by(seed, mutant)
        if found & {*mutant.breaks.split()}:
            return Caught(found, f"seed {seed} of `--faults {mutant.mix}`", seed)
    return None


def broken_by(seed: int, mutant: Mutant) -> frozenset[str]:
    """The invariants that a schedule breaks, with the protocol as it is now."""
    setup = Setup(mix=parse_mix(mutant.mix), iterations=mutant.iterations, limits=mutant.limits)
    return frozenset(violation.number for violation in judge(seed, setup).violations)


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or m.put_in.__name__ in names]
    rows, alive = [], 0
    for mutant in chosen:
        changes = Changes()
        mutant.put_in(changes)
        try:
            caught = hunt(mutant)
        finally:
            changes.undo()
        if caught is not None and caught.seed >= 0 and broken_by(caught.seed, mutant):
            raise SystemExit(f"{caught.by} breaks the product itself: that proves nothing")
        alive += caught is None
        verdict = (
            f"{', '.join(sorted(caught.invariants))} | {caught.by}" if caught else "nothing | it survives"
        )
        rows.append(f"| {mutant.fault} | {verdict} |")
        print(f"{mutant.name:36} {verdict}", flush=True)
    print(f"{len(chosen)} mutants, {alive} survive")
    if not names:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        table = "\n".join(["| fault | breaks | found by |", "| --- | --- | --- |", *rows])
        PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
