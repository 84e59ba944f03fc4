"""Updates by processes that stay: to the last bit those of processes that load the policy anew.

`python kept_updates.py FOLDER CASE...` (parallel_updates.py says what a case is). Each case's processes make three versions with what they
hold, and are then asked for what they do not hold; others, which are formed anew for each version, make the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parallel_updates import Case, import_before_forking, make_batch
from trainer_bench import Bench
from zero_checkpoints import in_place

from fsbarrier.training.processes import gather_json
from fsbarrier.workers.update import Updates


def update(updates: Updates, case: Case, folder: Path, out: str, before: str = "") -> bool:
    """Make `out` from `before`, whose versions are the last letters of their names; gives whether it went on with what is in memory."""
    work = Bench(folder, case.settings(folder).as_json())
    # The batch is always the same, so it is another policy's from the second update on.
    work.nested["algorithm"]["max_logprob_gap"] = 1e9
    reference = str(folder / "reference")
    result = work.update_by(updates, out, version=int(out[-1]), before=before, reference=reference)
    # Only one process of a node has a result.
    return any(gather_json(bool(result.get("went_on"))))


def stay(case: Case, folder: Path) -> None:
    def act(_: int) -> None:
        updates = Updates()
        assert not update(updates, case, folder, "kept1")
        for before, out in (("kept1", "kept2"), ("kept2", "kept3")):
            assert update(updates, case, folder, out, before), f"{case.text}: not kept"
            assert updates.stay()
        # They hold version 3, and are asked for version 1. What was loaded is held like any other.
        assert not update(updates, case, folder, "again2", "kept1")
        assert update(updates, case, folder, "again3", "again2")

    in_place(case, folder, act)


def anew(case: Case, folder: Path) -> None:
    before = ""
    for out in ("anew1", "anew2", "anew3"):
        in_place(case, folder, lambda _, names=(out, before): update(Updates(), case, folder, *names))
        before = out


def same(one: Path, other: Path, text: str) -> None:
    """Every file of weights and moments, byte by byte."""
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*.safetensors"))
    assert any(name.startswith("trainer/") for name in names)
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), f"{text}: {name} of {one.name}"


def main(folder: Path, cases: list[str]) -> None:
    import_before_forking(cases)
    for text in cases:
        case, place = Case(text), folder / text.replace(":", "-")
        make_batch(place, tied=False)
        stay(case, place)
        anew(case, place)
        for name in ("kept1", "kept2", "kept3", "again2", "again3"):
            same(place / name, place / f"anew{name[-1]}", text)
        print(f"{text}: kept and loaded are the same", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
