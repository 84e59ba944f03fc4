"""Queries the accelerator drivers: NVIDIA through NVML, AMD through `amd-smi`.

NVML is `pynvml` from nvidia-ml-py, loaded on first use. It raises many error classes; any error means that there is no answer.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsbarrier.host.accelerator_device import Accelerator, Device
from fsbarrier.host.amd_devices import amd_devices

PID_NAMESPACE = Path("/proc/self/ns/pid")
#: the kernel's fixed inode number of the initial namespace
HOST_PID_NAMESPACE = 0xEFFFFFFC


def devices(nvml: Any, environ: Mapping[str, str]) -> list[Device]:
    """The devices visible to programs with this environment. `nvml`: from `initialised_nvml`."""
    nvidia = _nvidia(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
    return [*nvidia, *amd_devices(environ)]


@contextlib.contextmanager
def initialised_nvml() -> Iterator[Any]:
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
    with initialised_nvml() as nvml, contextlib.suppress(Exception):
        return _text(nvml.nvmlSystemGetDriverVersion()) if nvml is not None else ""
    return ""


def _nvidia(nvml: Any, visible: str | None) -> Iterator[Device]:
    count = 0
    with contextlib.suppress(Exception):
        count = nvml.nvmlDeviceGetCount() if nvml is not None else 0
    for index in range(count):
        # A device that fell off the bus does not answer; `wait_released` then reports it as held.
        with contextlib.suppress(Exception):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if _visible(index, _text(nvml.nvmlDeviceGetUUID(handle)), visible):
                by_pid = _nvidia_by_pid(nvml, handle) if _in_the_hosts_pid_namespace() else None
                yield Device(_nvidia_now(nvml, index, handle), by_pid)


def _nvidia_now(nvml: Any, index: int, handle: Any) -> Accelerator:
    total = used = 0
    # Not supported if the device shares the machine's memory.
    with contextlib.suppress(Exception):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total), int(memory.used)
    return Accelerator(index, "nvidia", _text(nvml.nvmlDeviceGetName(handle)), total, used)


def _nvidia_by_pid(nvml: Any, handle: Any) -> dict[int, int | None] | None:
    found: dict[int, int | None] | None = None
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
        # One of them may be unsupported.
        with contextlib.suppress(Exception):
            entries = {int(each.pid): each.usedGpuMemory for each in getattr(nvml, function)(handle)}
            found = {**(found or {}), **entries}
    return found


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
