"""Accelerators of this machine: which there are, who holds their memory, and whether ours has come free.

    before = detect()                      # before the engine starts
    ...                                    # its processes: child.pids()
    outcome = wait_released(pids, before=before)     # Released | StillHeld

NVIDIA is asked through NVML (`pynvml` of nvidia-ml-py, loaded when first needed), AMD through sysfs; without either
there are none. Nothing here loads torch, makes a context on a device, or raises.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fsbarrier.retry import Backoff

Kind = Literal["nvidia", "amd"]
How = Literal["no accelerator", "processes", "level", "unverified"]

DRM = Path("/sys/class/drm")
PID_NAMESPACE = Path("/proc/self/ns/pid")
HOST_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode number of the initial namespace
AMD_VENDOR = "0x1002"
MIB = 1 << 20
# Memory comes free within seconds of a process's end.
PAUSES = Backoff(0.01, 1.0)


@dataclass(frozen=True)
class Accelerator:
    """One device as it is now. `index` is the driver's, in PCI order, counted for each kind apart."""

    index: int
    kind: Kind
    name: str
    memory_total_bytes: int  # 0: the driver does not say (devices that share the machine's memory)
    memory_used_bytes: int  # by everybody


@dataclass(frozen=True)
class Held:
    """Memory of one device that some of the processes asked for hold, or that was not in use before."""

    kind: Kind
    index: int
    name: str
    bytes: int | None  # None: the driver names the processes without it, or does not answer at all
    processes: Mapping[int, str] = field(default_factory=dict)  # pid -> name; {} where only the level tells

    def __str__(self) -> str:
        device = f"{self.kind} {self.index} ({self.name})"
        if not self.processes:
            return f"{device} {'does not answer' if self.bytes is None else f'uses {_mib(self.bytes)} more than before'}"
        amount = "memory" if self.bytes is None else _mib(self.bytes)
        return f"{device}: {amount} held by {', '.join(f'{n} ({p})' for p, n in self.processes.items())}"


@dataclass(frozen=True)
class Released:
    """All that was ours is free. `how` it was seen: processes' entries, levels, or no way to see it (`unverified`)."""

    seconds: float
    how: How


@dataclass(frozen=True)
class StillHeld:
    """Not free at the deadline, or when `cancelled`."""

    seconds: float
    held: tuple[Held, ...]
    cancelled: bool = False

    def __str__(self) -> str:
        return f"accelerator memory not free after {self.seconds:.0f} s: " + "; ".join(map(str, self.held))


def detect(environ: Mapping[str, str] | None = None) -> list[Accelerator]:
    """The devices that `environ` (None: ours) lets programs see; [] without any, or without a working driver."""
    with _nvml() as nvml:
        return [device.now for device in _look(nvml, os.environ if environ is None else environ)]


def memory_of(pids: Collection[int]) -> list[Held]:
    """What `pids` hold on each device whose driver tells memory by process (not AMD's, not in most containers)."""
    with _nvml() as nvml:
        return [held for device in _look(nvml, os.environ) if (held := device.held_by(pids)) is not None]


def wait_released(
    pids: Collection[int],
    *,
    before: Sequence[Accelerator] | None = None,
    budget_bytes: int = 512 * MIB,
    deadline_s: float = 50.0,
    cancel: threading.Event | None = None,
) -> Released | StillHeld:
    """Wait until `pids` (that may have ended meanwhile) hold no more than `budget_bytes` on any device.

    Where the driver does not tell by process (AMD; in containers NVML gives the host's pids, or none), a device
    counts as free when no more than the budget is in use beyond what was in `before`, that is `detect()` from before
    `pids` were started; without `before` that is not verified. A device of `before` that no longer answers is held.
    """
    begin = time.monotonic()
    cancel = threading.Event() if cancel is None else cancel
    pauses = iter(PAUSES)
    with _nvml() as nvml:
        while True:
            devices = _look(nvml, os.environ)
            seen = [device.check(pids, _find(device.now, before), budget_bytes) for device in devices]
            present = [device.now for device in devices]
            mute = (Held(d.kind, d.index, d.name, None) for d in before or () if _find(d, present) is None)
            held = (*(each for each in seen if isinstance(each, Held)), *mute)
            elapsed = time.monotonic() - begin
            if not held:
                return Released(elapsed, _weakest(seen))
            if elapsed >= deadline_s:
                return StillHeld(elapsed, held)
            if cancel.wait(min(next(pauses), deadline_s - elapsed)):
                return StillHeld(time.monotonic() - begin, held, cancelled=True)


@dataclass(frozen=True)
class _Device:
    """A device with the memory of its processes: pid -> bytes; None where the driver does not tell by our pids."""

    now: Accelerator
    by_pid: Mapping[int, int | None] | None

    def held_by(self, pids: Collection[int]) -> Held | None:
        ours = {pid: amount for pid, amount in (self.by_pid or {}).items() if pid in pids}
        if not ours:
            return None
        amounts = [amount for amount in ours.values() if amount is not None]
        total = sum(amounts) if len(amounts) == len(ours) else None
        return Held(
            self.now.kind, self.now.index, self.now.name, total, {pid: _name(pid) for pid in sorted(ours)}
        )

    def check(self, pids: Collection[int], before: Accelerator | None, budget_bytes: int) -> Held | How:
        """Held, or how it was seen that nothing is."""
        held = self.held_by(pids)
        if held is None and self.by_pid is not None:
            return "processes"
        if held is not None and held.bytes is not None:
            return held if held.bytes > budget_bytes else "processes"
        if before is None or not self.now.memory_total_bytes:
            return held or "unverified"
        more = self.now.memory_used_bytes - before.memory_used_bytes
        if more <= budget_bytes:
            return "level"
        return held or Held(self.now.kind, self.now.index, self.now.name, more)


def _weakest(seen: Sequence[Held | How]) -> How:
    order: tuple[How, ...] = ("unverified", "level", "processes")
    return next((how for how in order if how in seen), "no accelerator")


def _find(device: Accelerator, among: Sequence[Accelerator] | None) -> Accelerator | None:
    return next(
        (each for each in among or () if (each.kind, each.index) == (device.kind, device.index)), None
    )


def _mib(amount: int) -> str:
    return f"{amount / MIB:.0f} MiB"


def _name(pid: int) -> str:
    """What the process calls itself, for people; it decides nothing."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "ended"


def _look(nvml: Any, environ: Mapping[str, str]) -> list[_Device]:
    return [*_nvidia(nvml, environ.get("CUDA_VISIBLE_DEVICES")), *_amd(environ)]


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised, or None. Held over a whole wait: without persistence mode each start of it takes a second."""
    nvml = None
    with contextlib.suppress(
        Exception
    ):  # not installed, or no driver: then nothing can use the devices either
        module = importlib.import_module("pynvml")
        module.nvmlInit()
        nvml = module
    try:
        yield nvml
    finally:
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()


def _nvidia(nvml: Any, visible: str | None) -> list[_Device]:
    found: list[_Device] = []
    if nvml is None:
        return found
    tells, count = _in_the_hosts_pid_namespace(), 0
    with contextlib.suppress(Exception):
        count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        with contextlib.suppress(Exception):  # it fell off the bus: `wait_released` misses it
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if _visible(index, _text(nvml.nvmlDeviceGetUUID(handle)), visible):
                found.append(
                    _Device(_nvidia_now(nvml, index, handle), _nvidia_by_pid(nvml, handle) if tells else None)
                )
    return found


def _nvidia_now(nvml: Any, index: int, handle: Any) -> Accelerator:
    total = used = 0
    with contextlib.suppress(Exception):  # not supported where the device shares the machine's memory
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total), int(memory.used)
    return Accelerator(index, "nvidia", _text(nvml.nvmlDeviceGetName(handle)), total, used)


def _nvidia_by_pid(nvml: Any, handle: Any) -> dict[int, int | None] | None:
    found: dict[int, int | None] | None = None
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
        with contextlib.suppress(Exception):  # one of them may be unsupported
            for process in getattr(nvml, function)(handle):
                found = {} if found is None else found
                amount = process.usedGpuMemory
                found[int(process.pid)] = None if amount is None else int(amount)
            found = {} if found is None else found
    return found


def _visible(index: int, uuid: str, visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES lets programs see a device; CUDA ends the list at the first entry it cannot read."""
    if visible is None:
        return True
    for entry in (each.strip() for each in visible.split(",")):
        if entry.startswith("MIG-"):
            return True  # a part of some device: watch them all
        if entry.startswith("GPU-"):
            if uuid.startswith(entry):
                return True
        elif not entry.isdecimal():
            return False
        elif int(entry) == index:
            return True
    return False


def _amd(environ: Mapping[str, str]) -> list[_Device]:
    """AMD's devices in the order of their cards' numbers; a display chip without memory of its own is none."""
    visible = environ.get("ROCR_VISIBLE_DEVICES", environ.get("HIP_VISIBLE_DEVICES"))
    cards: list[Path] = []
    with contextlib.suppress(OSError):
        cards = [path / "device" for path in DRM.iterdir() if path.name.removeprefix("card").isdecimal()]
    cards = [
        card for card in cards if _read(card / "vendor") == AMD_VENDOR and _read(card / "mem_info_vram_total")
    ]
    found: list[_Device] = []
    for index, card in enumerate(sorted(cards, key=lambda card: int(card.parent.name.removeprefix("card")))):
        name = _read(card / "product_name") or f"AMD {_read(card / 'device')}"
        total, used = _read(card / "mem_info_vram_total") or "", _read(card / "mem_info_vram_used") or ""
        if total.isdecimal() and used.isdecimal() and _visible(index, "", visible):
            found.append(_Device(Accelerator(index, "amd", name, int(total), int(used)), None))
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _in_the_hosts_pid_namespace() -> bool:
    """Elsewhere the pids that NVML gives may be the host's, and one may equal one of ours by chance."""
    try:
        return os.stat(PID_NAMESPACE).st_ino == HOST_PID_NAMESPACE
    except OSError:
        return False
