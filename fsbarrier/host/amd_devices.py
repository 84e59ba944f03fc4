"""AMD accelerators: reads sysfs, and falls back to `amd-smi` or `rocm-smi`.

The tools read the same files, but sysfs needs no subprocess and also reports memory by process. The kernel's compute driver (KFD) lists
devices in ROCm's order. Partitioned devices are not supported.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsbarrier.host.accelerator_device import Accelerator, Device
from fsbarrier.reading import MIB

DRM = Path("/sys/class/drm")
KFD = Path("/sys/class/kfd/kfd")
#: exists wherever ROCm works
KFD_DEVICE = Path("/dev/kfd")
VENDOR = "0x1002"
TOOL_S = 30.0
UNITS = {"B": 1, "KB": 1 << 10, "MB": MIB, "GB": 1 << 30}


def amd_devices(environ: Mapping[str, str], tells_our_pids: bool) -> list[Device]:
    """The devices visible with `environ`. `tells_our_pids`: the kernel's pids are valid in this namespace."""
    found = list(_of_the_kernel(tells_our_pids)) or [Device(each, None) for each in _of_a_tool()]
    # ROCm filters devices twice: the second variable indexes the devices that the first one left.
    left = _chosen(found, environ.get("ROCR_VISIBLE_DEVICES"))
    left = _chosen(left, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))
    return sorted(left, key=lambda device: device.now.index)


def _chosen(devices: Sequence[Device], visible: str | None) -> list[Device]:
    """The devices selected by a list of numbers and unique names, up to the first invalid entry."""
    if visible is None:
        return list(devices)
    chosen: list[Device] = []
    for entry in (each.strip() for each in visible.split(",")):
        if entry.isdecimal():
            named = devices[int(entry) : int(entry) + 1]
        else:
            named = [each for each in devices if each.unique_name and each.unique_name == entry.lower()]
        if not named:
            break
        chosen += [each for each in named if each not in chosen]
    return chosen


# --- the kernel ---------------------------------------------------------------------------------------------------------


def _of_the_kernel(tells_our_pids: bool) -> Iterator[Device]:
    for index, (gpu_id, folder) in enumerate(_kfd_nodes() or _cards()):
        total, used = _read(folder / "mem_info_vram_total"), _read(folder / "mem_info_vram_used")
        if total.isdecimal() and used.isdecimal():
            name = _read(folder / "product_name") or f"AMD {_read(folder / 'device')}"
            by_pid = _by_pid(gpu_id) if gpu_id and tells_our_pids else None
            unique = _read(folder / "unique_id").removeprefix("0x")
            now = Accelerator(index, "amd", name, int(total), int(used))
            yield Device(now, by_pid, f"gpu-{unique.lower()}" if unique else "")


def _kfd_nodes() -> list[tuple[str, Path]]:
    """(KFD id, sysfs folder) of each device that this process may use."""
    found, nodes = [], KFD / "topology" / "nodes"
    for name in sorted((name for name in _names(nodes) if name.isdecimal()), key=int):
        # The id is 0 for a CPU, and unreadable if the container may not use the device.
        gpu_id = _read(nodes / name / "gpu_id")
        minor = re.search(r"^drm_render_minor (\d+)$", _read(nodes / name / "properties"), re.MULTILINE)
        if gpu_id.isdecimal() and int(gpu_id) and minor:
            found.append((gpu_id, DRM / f"renderD{minor[1]}" / "device"))
    return found


def _cards() -> list[tuple[str, Path]]:
    """Without KFD: the graphics cards in numerical order, without display chips that have no memory of their own."""
    numbers = sorted(int(name[4:]) for name in _names(DRM) if re.fullmatch(r"card\d+", name))
    cards = [DRM / f"card{number}" / "device" for number in numbers]
    return [
        ("", card)
        for card in cards
        if _read(card / "vendor") == VENDOR and _read(card / "mem_info_vram_total")
    ]


def _by_pid(gpu_id: str) -> dict[int, int | None] | None:
    """A device's memory by process; None if the kernel does not report it."""
    if not (KFD / "proc").is_dir():
        return None
    pids = [name for name in _names(KFD / "proc") if name.isdecimal()]
    amounts = {int(pid): _read(KFD / "proc" / pid / f"vram_{gpu_id}") for pid in pids}
    told: dict[int, int | None] = {pid: int(amount) for pid, amount in amounts.items() if amount.isdecimal()}
    return told if told or not pids else None


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _read(path: Path) -> str:
    """The contents of a small file; "" if it is missing."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# --- AMD's tools --------------------------------------------------------------------------------------------------------


def _of_a_tool() -> list[Accelerator]:
    """The devices according to the first installed AMD tool that lists any. The tools number devices in bus order."""
    if not KFD_DEVICE.exists():
        return []
    tools: list[tuple[list[str], Callable[[str], list[Accelerator]]]] = [
        (["amd-smi", "metric", "--mem-usage", "--json"], of_amd_smi),
        (["rocm-smi", "--showmeminfo", "vram", "--json"], of_rocm_smi),
    ]
    for argv, parse in tools:
        # The tool is not installed, hangs, or has another output format.
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
            said = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_S, check=True
            )
            if found := parse(said.stdout.decode(errors="replace")):
                return found
    return []


def of_amd_smi(said: str) -> list[Accelerator]:
    """The devices in the output of `amd-smi metric --mem-usage --json`. Raises ValueError, LookupError, TypeError."""
    value = _json(said)
    rows = value["gpu_data"] if isinstance(value, dict) else value
    found = [(int(row["gpu"]), row["mem_usage"]) for row in rows]
    return [
        Accelerator(number, "amd", f"AMD {number}", _amount(usage["total_vram"]), _amount(usage["used_vram"]))
        for number, usage in sorted(found, key=lambda each: each[0])
    ]


def of_rocm_smi(said: str) -> list[Accelerator]:
    """The devices in the output of `rocm-smi --showmeminfo vram --json`. Raises ValueError, LookupError, TypeError."""
    cards = {int(name[4:]): card for name, card in _json(said).items() if re.fullmatch(r"card\d+", name)}
    total, used = "VRAM Total Memory (B)", "VRAM Total Used Memory (B)"
    return [
        Accelerator(number, "amd", f"AMD {number}", int(card[total]), int(card[used]))
        for number, card in sorted(cards.items())
    ]


def _json(said: str) -> Any:
    """The JSON at the end of a tool's output; warnings may come before it."""
    begin = re.search(r"^\s*([\[{])", said, re.MULTILINE)
    return json.loads(said[begin.start(1) :] if begin else said)


def _amount(value: Mapping[str, Any]) -> int:
    return int(value["value"]) * UNITS[value.get("unit", "MB")]
