"""What the drivers of this machine's accelerators say: NVIDIA's through NVML, AMD's through the kernel; without either there are none.

NVML is `pynvml` of nvidia-ml-py, loaded when it is first needed; its errors are of many classes, and each means that there is no answer.
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
    """All that `environ` lets programs see. `nvml`: of `initialised_nvml`."""
    nvidia = _nvidia(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
    return [*nvidia, *amd_devices(environ, _in_the_hosts_pid_namespace())]


@contextlib.contextmanager
def initialised_nvml() -> Iterator[Any]:
    """NVML, or None. Held over a whole wait: without persistence mode each start of it takes a second."""
    nvml = None
    # It is not installed, or there is no driver: then nothing can use the devices either.
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
    """NVIDIA's driver; empty where there is none. AMD's is part of the kernel."""
    with initialised_nvml() as nvml, contextlib.suppress(Exception):
        return _text(nvml.nvmlSystemGetDriverVersion()) if nvml is not None else ""
    return ""


def _nvidia(nvml: Any, visible: str | None) -> Iterator[Device]:
    count = 0
    with contextlib.suppress(Exception):
        count = nvml.nvmlDeviceGetCount() if nvml is not None else 0
    for index in range(count):
        # A device that fell off the bus does not answer: `wait_released` misses it.
        with contextlib.suppress(Exception):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if _visible(index, _text(nvml.nvmlDeviceGetUUID(handle)), visible):
                by_pid = _nvidia_by_pid(nvml, handle) if _in_the_hosts_pid_namespace() else None
                yield Device(_nvidia_now(nvml, index, handle), by_pid)


def _nvidia_now(nvml: Any, index: int, handle: Any) -> Accelerator:
    total = used = 0
    # This is not supported where the device shares the machine's memory.
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
    """Whether CUDA_VISIBLE_DEVICES lets programs see a device; CUDA ends the list at the first entry it cannot read."""
    if visible is None:
        return True
    for entry in (each.strip() for each in visible.split(",")):
        if entry.startswith("MIG-"):
            # The name of a part (MIG) does not say of which device it is a part, so all devices are watched.
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
    """Elsewhere the pids that NVML gives may be the host's, and one may equal one of ours by chance."""
    try:
        return os.stat(PID_NAMESPACE).st_ino == HOST_PID_NAMESPACE
    except OSError:
        return False
