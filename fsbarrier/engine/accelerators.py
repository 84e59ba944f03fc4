"""Detects accelerators, and waits until our processes have released their memory: NVIDIA through NVML, AMD through `amd-smi`.

    before = detect()                      # before the engine starts
    ...                                    # its processes: child.pids()
    outcome = wait_released(pids, before=before)     # Released | StillHeld

NVML is `pynvml` from nvidia-ml-py, loaded on first use. It raises many error classes; any error means that there is no answer. Nothing here
loads torch, creates a device context, or raises.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fsbarrier.store.reading import MIB
from fsbarrier.store.retry import Backoff

#: how the release was verified, from the weakest evidence to the strongest
EVIDENCE = ("unverified", "level", "processes", "no accelerator")

#: memory is freed within seconds after a process ends
PAUSES = Backoff(0.01, 1.0)
PID_NAMESPACE = Path("/proc/self/ns/pid")
#: the kernel's fixed inode number of the initial namespace
HOST_PID_NAMESPACE = 0xEFFFFFFC
#: exists wherever ROCm works
KFD_DEVICE = Path("/dev/kfd")
TOOL_S = 30.0
UNITS = {"B": 1, "KB": 1 << 10, "MB": MIB, "GB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The current state of a device. `index`: assigned by the driver (in PCI order), separately for each kind.

    `memory_total_bytes`: 0 if unknown, for devices that share the machine's memory; `memory_used_bytes`: by all processes. `by_pid`: pid ->
    bytes (None: amount unknown); None if the driver does not report it with our pids.
    """

    index: int
    kind: Literal["nvidia", "amd"]
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    by_pid: Mapping[int, int | None] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.index} ({self.name})"


@dataclass(frozen=True, slots=True)
class Released:
    """All our memory is free. `how`: one of EVIDENCE."""

    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class StillHeld:
    """Some memory was not free at the deadline, or when cancelled. `held`: a text for each device that is held."""

    seconds: float
    held: tuple[str, ...]
    cancelled: bool = False

    def __str__(self) -> str:
        return f"accelerator memory not free after {self.seconds:.0f} s: " + "; ".join(self.held)


def detect(environ: Mapping[str, str] | None = None) -> list[Accelerator]:
    """The devices visible with `environ` (None: ours); [] without devices or a working driver."""
    with _initialised_nvml() as nvml:
        return _devices(nvml, os.environ if environ is None else environ)


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
    with _initialised_nvml() as nvml:
        for pause_s in PAUSES:
            present = {(each.kind, each.index): each for each in _devices(nvml, visible)}
            seen = [_check(now, pids, earlier.get(key), budget_bytes) for key, now in present.items()]
            seen += [f"{gone} does not answer" for key, gone in earlier.items() if key not in present]
            held = tuple(each for each in seen if each not in EVIDENCE)
            elapsed = time.monotonic() - begin
            if not held:
                return Released(elapsed, min(seen, key=EVIDENCE.index, default=EVIDENCE[-1]))
            if elapsed >= deadline_s:
                break
            if cancel.wait(min(pause_s, deadline_s - elapsed)):
                return StillHeld(time.monotonic() - begin, held, cancelled=True)
    return StillHeld(elapsed, held)


def _check(now: Accelerator, pids: Collection[int], before: Accelerator | None, budget_bytes: int) -> str:
    """The evidence that `pids` hold at most `budget_bytes` of a device, or what they hold."""
    ours = {pid: amount for pid, amount in (now.by_pid or {}).items() if pid in pids}
    amounts = [amount for amount in ours.values() if amount is not None]
    holders = ", ".join(f"{_process_name(pid)} ({pid})" for pid in sorted(ours))
    if now.by_pid is not None and len(amounts) == len(ours):
        held = sum(amounts)
        return "processes" if held <= budget_bytes else f"{now}: {held // MIB} MiB held by {holders}"
    # The driver does not report our share, so use the device's total.
    if before is None or not now.memory_total_bytes:
        return f"{now}: memory held by {holders}" if ours else "unverified"
    more = now.memory_used_bytes - before.memory_used_bytes
    return "level" if more <= budget_bytes else f"{now} uses {more // MIB} MiB more than before"


def _process_name(pid: int) -> str:
    """The process's name, for display only."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "ended"


def _devices(nvml: Any, environ: Mapping[str, str]) -> list[Accelerator]:
    """The devices visible to programs with this environment. `nvml`: from `_initialised_nvml`."""
    return [*_nvidia(nvml, environ.get("CUDA_VISIBLE_DEVICES")), *_amd(environ)]


# --- NVIDIA ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _initialised_nvml() -> Iterator[Any]:
    """NVML, or None. Kept initialised during a whole wait, because without persistence mode each initialisation takes a second."""
    nvml = None
    # Without the package or the driver, no program can use the devices either.
    with contextlib.suppress(Exception):
        module = importlib.import_module("pynvml")
        module.nvmlInit()
        nvml = module
    try:
        yield nvml
    finally:
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()


def driver_version() -> str:
    """The version of NVIDIA's driver; "" without one. AMD's driver is part of the kernel."""
    with _initialised_nvml() as nvml, contextlib.suppress(Exception):
        return _text(nvml.nvmlSystemGetDriverVersion())
    return ""


def _nvidia(nvml: Any, visible: str | None) -> Iterator[Accelerator]:
    count = 0
    with contextlib.suppress(Exception):
        count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        # A device that fell off the bus does not answer; `wait_released` then reports it as held.
        with contextlib.suppress(Exception):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if not _visible(index, _text(nvml.nvmlDeviceGetUUID(handle)), visible):
                continue
            total = used = 0
            # Not supported if the device shares the machine's memory.
            with contextlib.suppress(Exception):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                total, used = int(memory.total), int(memory.used)
            by_pid = _nvidia_by_pid(nvml, handle) if _in_the_hosts_pid_namespace() else None
            yield Accelerator(index, "nvidia", _text(nvml.nvmlDeviceGetName(handle)), total, used, by_pid)


def _nvidia_by_pid(nvml: Any, handle: Any) -> dict[int, int | None] | None:
    used: dict[int, int | None] | None = None
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
        # One of them may be unsupported.
        with contextlib.suppress(Exception):
            entries = {int(each.pid): each.usedGpuMemory for each in getattr(nvml, function)(handle)}
            used = {**(used or {}), **entries}
    return used


def _visible(index: int, uuid: str, visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES includes a device; CUDA ignores everything after the first invalid entry."""
    if visible is None:
        return True
    for entry in (each.strip() for each in visible.split(",")):
        if entry.startswith("MIG-"):
            # The name of a MIG instance does not identify its device, so include all devices.
            return True
        if entry.startswith("GPU-"):
            if uuid.startswith(entry):
                return True
        elif not entry.isdecimal():
            return False
        elif int(entry) == index:
            return True
    return False


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _in_the_hosts_pid_namespace() -> bool:
    """Whether NVML's pids are valid here. In another pid namespace they may be the host's and match ours only by chance."""
    try:
        return os.stat(PID_NAMESPACE).st_ino == HOST_PID_NAMESPACE
    except OSError:
        return False


# --- AMD: its tool numbers devices in bus order, and does not tell which process holds memory --------------------------------


def _amd(environ: Mapping[str, str]) -> list[Accelerator]:
    """The devices visible with `environ`; [] if the tool is not installed, hangs, or has another output format."""
    accelerators: list[Accelerator] = []
    if KFD_DEVICE.exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
            argv = ["amd-smi", "metric", "--mem-usage", "--json"]
            answer = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_S, check=True
            )
            accelerators = of_amd_smi(answer.stdout.decode(errors="replace"))
    # ROCm filters devices twice: the second variable indexes the devices that the first one left.
    left = _chosen(accelerators, environ.get("ROCR_VISIBLE_DEVICES"))
    left = _chosen(left, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))
    return sorted(left, key=lambda device: device.index)


def of_amd_smi(output: str) -> list[Accelerator]:
    """The devices in the output of `amd-smi metric --mem-usage --json`. Raises ValueError, LookupError, TypeError."""
    # Warnings may come before the JSON.
    begin = re.search(r"^\s*([\[{])", output, re.MULTILINE)
    value = json.loads(output[begin.start(1) :] if begin else output)
    rows = value["gpu_data"] if isinstance(value, dict) else value
    used = [(int(row["gpu"]), row["mem_usage"]) for row in rows]
    return [
        Accelerator(number, "amd", f"AMD {number}", _amount(usage["total_vram"]), _amount(usage["used_vram"]))
        for number, usage in sorted(used, key=lambda each: each[0])
    ]


def _amount(value: Mapping[str, Any]) -> int:
    return int(value["value"]) * UNITS[value.get("unit", "MB")]


def _chosen(devices: Sequence[Accelerator], visible: str | None) -> list[Accelerator]:
    """The devices that a list of numbers selects, up to the first invalid entry."""
    if visible is None:
        return list(devices)
    chosen: list[Accelerator] = []
    for entry in (each.strip() for each in visible.split(",")):
        if not entry.isdecimal() or int(entry) >= len(devices):
            break
        if devices[int(entry)] not in chosen:
            chosen.append(devices[int(entry)])
    return chosen
