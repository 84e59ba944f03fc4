"""Detects accelerators, shows which processes hold their memory, and waits until ours is released.

    before = detect()                      # before the engine starts
    ...                                    # its processes: child.pids()
    outcome = wait_released(pids, before=before)     # Released | StillHeld

accelerator_drivers.py queries the drivers. Nothing here loads torch, creates a device context, or raises.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fsbarrier.host.accelerator_device import Accelerator, Device, Kind
from fsbarrier.host.accelerator_drivers import devices, initialised_nvml
from fsbarrier.store.reading import MIB
from fsbarrier.store.retry import Backoff

__all__ = ["Accelerator", "HeldMemory", "Released", "StillHeld", "detect", "wait_released"]

#: how the release was verified, from the weakest evidence to the strongest
Evidence = Literal["unverified", "level", "processes", "no accelerator"]
EVIDENCE: tuple[Evidence, ...] = ("unverified", "level", "processes", "no accelerator")

#: memory is freed within seconds after a process ends
PAUSES = Backoff(0.01, 1.0)


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Memory of one device that is still held by the given processes, or in use beyond the earlier level."""

    kind: Kind
    index: int
    name: str
    #: None if the driver reports no amount or does not answer
    bytes: int | None
    #: pid -> name; empty if only the device's total is known
    processes: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        device = f"{self.kind} {self.index} ({self.name})"
        amount = "memory" if self.bytes is None else f"{self.bytes / MIB:.0f} MiB"
        if self.processes:
            holders = ", ".join(f"{name} ({pid})" for pid, name in self.processes.items())
            return f"{device}: {amount} held by {holders}"
        return (
            f"{device} does not answer" if self.bytes is None else f"{device} uses {amount} more than before"
        )


@dataclass(frozen=True, slots=True)
class Released:
    """All our memory is free. `how`: verified by process entries, by device totals, or not at all ("unverified")."""

    seconds: float
    how: Evidence


@dataclass(frozen=True, slots=True)
class StillHeld:
    """Not free at the deadline, or when cancelled."""

    seconds: float
    held: tuple[HeldMemory, ...]
    cancelled: bool = False

    def __str__(self) -> str:
        return f"accelerator memory not free after {self.seconds:.0f} s: " + "; ".join(map(str, self.held))


def detect(environ: Mapping[str, str] | None = None) -> list[Accelerator]:
    """The devices visible with `environ` (None: ours); [] without devices or a working driver."""
    with initialised_nvml() as nvml:
        return [device.now for device in devices(nvml, os.environ if environ is None else environ)]


def wait_released(
    pids: Collection[int],
    *,
    before: Sequence[Accelerator] = (),
    environ: Mapping[str, str] | None = None,
    budget_bytes: int = 512 * MIB,
    deadline_s: float = 50.0,
    cancel: threading.Event | None = None,
) -> Released | StillHeld:
    """Wait until `pids` (which may have ended) hold at most `budget_bytes` on every device visible with `environ`.

    If the driver does not report memory by process (in containers it reports the host's pids, or none), a device counts as
    free when it uses at most `budget_bytes` more than in `before`, a `detect()` from before the start of `pids`; without `before` the
    release is not verified. A device of `before` that no longer answers counts as held.
    """
    begin = time.monotonic()
    cancel = threading.Event() if cancel is None else cancel
    visible = os.environ if environ is None else environ
    earlier = {(each.kind, each.index): each for each in before}
    with initialised_nvml() as nvml:
        for pause_s in PAUSES:
            present = {(each.now.kind, each.now.index): each for each in devices(nvml, visible)}
            seen = [_check(each, pids, earlier.get(key), budget_bytes) for key, each in present.items()]
            seen += [
                HeldMemory(d.kind, d.index, d.name, None) for key, d in earlier.items() if key not in present
            ]
            held = tuple(each for each in seen if isinstance(each, HeldMemory))
            elapsed = time.monotonic() - begin
            if not held:
                return Released(elapsed, next(each for each in EVIDENCE if each in [*seen, EVIDENCE[-1]]))
            if elapsed >= deadline_s:
                break
            if cancel.wait(min(pause_s, deadline_s - elapsed)):
                return StillHeld(time.monotonic() - begin, held, cancelled=True)
    return StillHeld(elapsed, held)


def _check(
    device: Device, pids: Collection[int], before: Accelerator | None, budget_bytes: int
) -> HeldMemory | Evidence:
    """The memory that `pids` hold on a device, or the evidence that it is within the budget."""
    now, by_pid = device.now, device.by_pid
    ours = {pid: amount for pid, amount in (by_pid or {}).items() if pid in pids}
    amounts = [amount for amount in ours.values() if amount is not None]
    if by_pid is not None and len(amounts) == len(ours) and sum(amounts) <= budget_bytes:
        return "processes"
    held = HeldMemory(now.kind, now.index, now.name, None, {pid: _process_name(pid) for pid in sorted(ours)})
    if ours and len(amounts) == len(ours):
        return replace(held, bytes=sum(amounts))
    # The driver does not report our share, so use the device's total.
    if before is None or not now.memory_total_bytes:
        return held if ours else "unverified"
    more = now.memory_used_bytes - before.memory_used_bytes
    if more <= budget_bytes:
        return "level"
    return held if ours else replace(held, bytes=more)


def _process_name(pid: int) -> str:
    """The process's name, for display only."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "ended"
