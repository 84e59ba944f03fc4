"""A run that begins with another run's policy and trainer state goes on to the last bit as that run does.

`python init_optimizer_updates.py FOLDER CASE...`: a case as parallel_updates.py says it; after it `lora`: of adapters; `CASE>CASE`: the
other run's policy was made by the first, and both runs go on with the second.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kept_updates import same
from parallel_updates import Case, import_before_forking, make_batch
from trainer_bench import Bench
from zero_checkpoints import in_place

from fsbarrier.cli.start import other_runs_policy
from fsbarrier.processes.worker_contract import ProgressWriter
from fsbarrier.rundir import runrecord
from fsbarrier.settings.sections import Settings
from fsbarrier.workers.update import Updates

FIRST, SECOND = (f"checkpoints/policy-{version:06d}.g0001" for version in (1, 2))


def settings(case: Case, folder: Path) -> Settings:
    nested = case.settings(folder).as_json()
    # The batch is always the same, so it is another policy's from the second update on.
    nested["algorithm"]["max_logprob_gap"] = 1e9
    nested["lora"]["rank"] = 4 if case.text.endswith("lora") else 0
    # Steps in the middle of the warm-up, whose number is seen in what they do.
    nested["optimizer"]["warmup_steps"] = 9
    return Settings.from_json(nested)


def update(case: Case, folder: Path, chosen: Settings, out: str, **fields: Any) -> None:
    """Make `out` by new processes."""

    def act(_: int) -> None:
        spec: Any = Bench(folder, chosen.as_json()).update_spec(out, **fields)
        Updates().main(spec | {"reference": str(folder / "reference")}, chosen, ProgressWriter(None))

    in_place(case, folder, act)


def begin(folder: Path, chosen: Settings, name: str, *, state: bool) -> tuple[Path, Settings]:
    """What a new run begins with: its first policy, and its settings."""
    chosen = replace(chosen, init_from=f"{folder}@1", init_optimizer=state)
    policy = other_runs_policy.find(str(chosen.init_from))
    found = other_runs_policy.find_state(chosen, policy) if state else None
    model = other_runs_policy.copy(str(chosen.init_from), policy, found, folder / f"{name} first_policy")
    return model, chosen


def weights(version: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(version.glob("model/*.safetensors"))]


def check(text: str, folder: Path) -> None:
    earlier, later = (Case(one) for one in (text.split(">") * 2)[:2])
    make_batch(folder, tied=False)
    chosen = settings(later, folder)
    runrecord.publish(runrecord.new(folder, chosen, tasks={}, model=str(folder / "model")))
    update(earlier, folder, settings(earlier, folder), FIRST)
    update(later, folder, chosen, SECOND, version=2, before=FIRST)
    for name, state in (("with", True), ("without", False)):
        model, new = begin(folder, chosen, name, state=state)
        update(later, folder, new, name, model=str(model), first_model=str(model))
    same(folder / SECOND, folder / "with", text)
    assert weights(folder / SECOND) == weights(folder / "with") != weights(folder / "without"), text
    print(f"{text}: goes on as the other run does", flush=True)


def main(folder: Path, cases: list[str]) -> None:
    import_before_forking([one for text in cases for one in text.split(">")])
    for number, text in enumerate(cases):
        check(text, folder / str(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
