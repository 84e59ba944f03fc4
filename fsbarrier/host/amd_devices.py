"""AMD accelerators, as `amd-smi` lists them. It numbers devices in bus order, and does not tell which process holds memory."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsbarrier.host.accelerator_device import Accelerator, Device
from fsbarrier.store.reading import MIB

#: exists wherever ROCm works
KFD_DEVICE = Path("/dev/kfd")
TOOL_S = 30.0
UNITS = {"B": 1, "KB": 1 << 10, "MB": MIB, "GB": 1 << 30}


def amd_devices(environ: Mapping[str, str]) -> list[Device]:
    """The devices visible with `environ`; [] if the tool is not installed, hangs, or has another output format."""
    found: list[Device] = []
    if KFD_DEVICE.exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
            argv = ["amd-smi", "metric", "--mem-usage", "--json"]
            said = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_S, check=True
            )
            found = [Device(each, None) for each in of_amd_smi(said.stdout.decode(errors="replace"))]
    # ROCm filters devices twice: the second variable indexes the devices that the first one left.
    left = _chosen(found, environ.get("ROCR_VISIBLE_DEVICES"))
    left = _chosen(left, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))
    return sorted(left, key=lambda device: device.now.index)


def of_amd_smi(said: str) -> list[Accelerator]:
    """The devices in the output of `amd-smi metric --mem-usage --json`. Raises ValueError, LookupError, TypeError."""
    # Warnings may come before the JSON.
    begin = re.search(r"^\s*([\[{])", said, re.MULTILINE)
    value = json.loads(said[begin.start(1) :] if begin else said)
    rows = value["gpu_data"] if isinstance(value, dict) else value
    found = [(int(row["gpu"]), row["mem_usage"]) for row in rows]
    return [
        Accelerator(number, "amd", f"AMD {number}", _amount(usage["total_vram"]), _amount(usage["used_vram"]))
        for number, usage in sorted(found, key=lambda each: each[0])
    ]


def _amount(value: Mapping[str, Any]) -> int:
    return int(value["value"]) * UNITS[value.get("unit", "MB")]


def _chosen(devices: Sequence[Device], visible: str | None) -> list[Device]:
    """The devices selected by a list of numbers, up to the first that is none of them."""
    if visible is None:
        return list(devices)
    chosen: list[Device] = []
    for entry in (each.strip() for each in visible.split(",")):
        if not entry.isdecimal() or int(entry) >= len(devices):
            break
        if devices[int(entry)] not in chosen:
            chosen.append(devices[int(entry)])
    return chosen
