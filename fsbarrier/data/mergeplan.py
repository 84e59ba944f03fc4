"""What a merge of trajectory files will take from which part: decided from headers alone, before anything is written."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier import __version__
from fsbarrier.data.shardscan import GroupEntry, ShardScan, mean_reward, scan_shard
from fsbarrier.errors import StoreError, UsageError


@dataclass(frozen=True)
class Part:
    """One file to merge from. `valid_bytes`: use only the groups inside its first so many bytes (None: all that are whole).
    `tasks`: use only the groups of these task indices (None: all)."""

    path: Path
    valid_bytes: int | None = None
    tasks: frozenset[int] | None = None


@dataclass
class Plan:
    """Which group is taken from which part; made from headers alone."""

    scans: list[ShardScan]
    taken: dict[int, tuple[int, GroupEntry]]  # by task index: position of the part, group
    duplicates: int
    unexpected: int
    missing: tuple[int, ...]
    damaged: list[str] = field(default_factory=list)
    without_signal: tuple[
        int, ...
    ] = ()  # tasks left out because their rewards are all equal, and others are enough
    surplus: tuple[int, ...] = ()  # tasks left out because those before them are enough
    rolled_out: tuple[int, float | None] = (
        0,
        None,
    )  # trajectories and their mean reward, those left out included

    @property
    def by_task(self) -> list[GroupEntry]:
        return [self.taken[task][1] for task in sorted(self.taken)]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the chosen groups by their content, and the missing tasks."""
        digest = hashlib.sha256(json.dumps(self.missing).encode())
        for group in self.by_task:
            crcs = " ".join(str(storage.crc) for storage in group.storages)
            digest.update(f"\n{group.task_index} {group.key} {group.body_crc} {crcs}".encode())
        return digest.hexdigest()


def make_plan(
    parts: Sequence[Part],
    expected: Collection[int] | None,
    excluded: Collection[tuple[int, str]] = (),
    keep: int | None = None,
) -> Plan:
    """Choose the groups to merge, reading headers only: of more than `keep` the first with signal, in the order of `expected`.

    Raises UsageError, StoreError.
    """
    plan = Plan([], {}, 0, 0, ())
    wanted = None if expected is None else frozenset(expected)
    for position, part in enumerate(parts):
        scan = scan_shard(part.path, part.valid_bytes, verify=False)
        if wanted is None and part.valid_bytes is not None and scan.valid_bytes < part.valid_bytes:
            raise StoreError(
                f"{part.path}: holds {scan.valid_bytes} valid bytes, but {part.valid_bytes} were acknowledged"
            )
        plan.scans.append(scan)
        for group in scan.groups:
            if (position, group.key) in excluded or (
                part.tasks is not None and group.task_index not in part.tasks
            ):
                continue
            if wanted is not None and group.task_index not in wanted:
                plan.unexpected += 1
            elif group.task_index in plan.taken:
                plan.duplicates += 1
            else:
                plan.taken[group.task_index] = (position, group)
    names = [storage.name for group in plan.by_task for storage in group.storages]
    if len(set(names)) != len(names):
        raise UsageError(
            "two parts were written with the same prefix and hold different tasks; they cannot be merged"
        )
    plan.missing = tuple(sorted(wanted - plan.taken.keys())) if wanted is not None else ()
    _keep_first(plan, len(plan.taken) if keep is None else keep, plan.taken if expected is None else expected)
    return plan


def _keep_first(plan: Plan, count: int, order: Iterable[int]) -> None:
    """Leave out all but `count` groups: of those with signal the last ones, of the others as many as it takes."""
    everything = plan.by_task
    plan.rolled_out = sum(group.trajectories for group in everything), mean_reward(everything)
    there = [task for task in dict.fromkeys(order) if task in plan.taken]
    useful = [task for task in there if plan.taken[task][1].signal]
    others = [task for task in there if not plan.taken[task][1].signal]
    spare = max(0, count - len(useful))
    plan.surplus, plan.without_signal = tuple(useful[count:]), tuple(others[spare:])
    for task in (*plan.surplus, *plan.without_signal):
        del plan.taken[task]


def merged_metadata(plan: Plan, parts: Sequence[Part], metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata of the result: the caller's fields and what the merge knows itself. Raises UsageError."""
    groups = plan.by_task
    full = {
        **metadata,
        "trajectories": sum(group.trajectories for group in groups),
        "groups": len(groups),
        "reward_mean": mean_reward(groups),
        "parts": [
            {"name": part.path.name, "bytes": scan.valid_bytes, "groups": len(scan.groups)}
            for part, scan in zip(parts, plan.scans, strict=True)
        ],
        "missing": list(plan.missing),
        "without_signal": list(plan.without_signal),
        "surplus": list(plan.surplus),
        "rolled_out": {"trajectories": plan.rolled_out[0], "reward_mean": plan.rolled_out[1]},
        "damaged": list(plan.damaged),
        "created_by": f"fsbarrier {__version__}",
    }
    try:
        plain: dict[str, Any] = json.loads(json.dumps(full))
    except (TypeError, ValueError) as error:
        raise UsageError(f"the metadata to store is not plain JSON: {error}") from None
    return plain


def missing_text(missing: tuple[int, ...]) -> str:
    return (
        f"{len(missing)} task{'s are' if len(missing) > 1 else ' is'} missing ({', '.join(ranges(missing))})"
    )


def ranges(numbers: Sequence[int], most: int = 12) -> Iterator[str]:
    """Sorted numbers in short: 1-4, 7, 9; no more than `most` items."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    for first, last in runs[:most]:
        yield str(first) if first == last else f"{first}-{last}"
    if len(runs) > most:
        yield "…"
