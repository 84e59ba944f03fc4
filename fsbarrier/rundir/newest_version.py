"""Finds the newest published policy version, for commands. The run's decisions say which it is: model.pt names the newest *whole* one."""

from __future__ import annotations

from pathlib import Path

from fsbarrier.protocol.facts import Fact, Generation, Payload
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.names import FACT, GENERATION, PHASE_FOLDER, POLICY_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore

PUBLISHES = "weights_publish"


def newest_version(log_path: Path) -> Path | None:
    """The folder of the policy version that the run serves now; None before the first.

    The newest generation has decided, or has adopted an older one's decision. Without its record, model.pt is asked. Raises OSError.
    """
    paths, store = RunPaths(log_path), LenientStore()
    for number in sorted(GENERATION.parse_all(store.names(paths.generations)), reverse=True):
        record = store.read(paths.generation(number), Generation)
        if record is None:
            continue
        adopted = record.decisions.get(PUBLISHES)
        decided = [_folder_of(adopted["value"] if adopted else None), *_decided_in(paths, store, number)]
        return next((paths.checkpoints / name for name in reversed(decided) if name), None)
    served = checkpoints.served_policy(log_path)
    return None if served is None else paths.checkpoint(served.number, served.generation)


def _decided_in(paths: RunPaths, store: LenientStore, generation: int) -> list[str]:
    """The folders that a generation has published, oldest first."""
    decided = []
    for row in PHASE_FOLDER.parse_all(store.names(paths.facts_of(generation))):
        folder = paths.phase(generation, row.index, row.name)
        for name in store.names(folder) if row.name == PUBLISHES else ():
            named = FACT.parse(name)
            fact = store.read(folder / name, Fact) if named is not None and named.status == "done" else None
            if fact is not None and named is not None:
                decided.append((named.iteration, _folder_of(fact.value)))
    return [name for _, name in sorted(decided) if name]


def _folder_of(value: Payload | None) -> str:
    name = value.get("folder") if value else None
    return name if isinstance(name, str) and POLICY_FOLDER.parse(name) is not None else ""
