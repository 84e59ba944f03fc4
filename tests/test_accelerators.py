"""Accelerators without having any: NVML is played by an object, AMD's tool by a script.

What drivers really answer in containers, and how fast they free memory, these tests cannot show.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsbarrier.engine import accelerators
from fsbarrier.engine.accelerators import (
    MIB,
    Accelerator,
    Released,
    StillHeld,
    detect,
    wait_released,
)

GIB = 1 << 30
OURS = 999_999_999  # no process has it: pids end at 4 million


class Nvml:
    """What of `pynvml` is used: devices with a level and processes, which `on_look` may change at each look."""

    class NVMLError(Exception):
        pass

    def __init__(self, *used: int) -> None:
        self.used = list(used)
        self.processes: list[dict[int, int | None]] = [{} for _ in used]
        self.broken: set[str] = set()
        self.open = 0
        self.looks = 0
        self.on_look: Callable[[int], None] = lambda look: None

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._call("init")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.open
        self.looks += 1
        self.on_look(self.looks)
        self._call("count")
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._call(f"handle{index}")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}{handle}-uuid"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA Play"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._call("memory")
        return SimpleNamespace(total=80 * GIB, used=self.used[handle], free=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._call("processes")
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in self.processes[handle].items()]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: int) -> list[Any]:
        raise self.NVMLError("not supported")


@pytest.fixture(autouse=True)
def no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this machine's devices nor its settings."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(accelerators, "KFD_DEVICE", tmp_path / "kfd_device")
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Nvml]:
    def play(*used: int, container: bool = False) -> Nvml:
        nvml = Nvml(*used)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(accelerators, "_in_the_hosts_pid_namespace", lambda: not container)
        return nvml

    return play


Play = Callable[..., Nvml]


def test_without_a_device_there_is_nothing_to_wait_for() -> None:
    assert detect() == []
    outcome = wait_released([os.getpid()])
    assert isinstance(outcome, Released) and outcome.how == "no accelerator"


def test_what_is_really_on_this_machine_is_found_without_an_error() -> None:
    """In a process of its own, with NVML as installed; neither torch nor any other heavy module is loaded for it."""
    code = (
        "import sys; from fsbarrier.engine.accelerators import detect, wait_released; before = set(sys.modules);"
        "print([(d.kind, d.memory_total_bytes >= 0) for d in detect()], wait_released([], deadline_s=0));"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    root = str(Path(accelerators.__file__).parents[2])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert ran.stdout.startswith("[")
    assert not {"torch", "numpy", "vllm"} & set(ran.stdout.splitlines()[1].split())


def test_detect_tells_every_device(play: Play) -> None:
    nvml = play(3 * GIB, 0)
    assert detect() == [
        Accelerator(0, "nvidia", "NVIDIA Play", 80 * GIB, 3 * GIB),
        Accelerator(1, "nvidia", "NVIDIA Play", 80 * GIB, 0),
    ]
    assert nvml.open == 0


@pytest.mark.parametrize("what", ["init", "count"])
def test_a_driver_that_fails_is_no_device(play: Play, what: str) -> None:
    nvml = play(GIB)
    nvml.broken.add(what)
    assert detect() == []
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2, 0", [0, 2]),
        ("0,nonsense,2", [0]),
        ("GPU-11", [1]),
        ("MIG-1234", [0, 1, 2]),
        ("7", []),
    ],
)
def test_only_devices_that_programs_will_see_count(play: Play, visible: str, expected: list[int]) -> None:
    play(0, 0, 0)
    assert [device.index for device in detect({"CUDA_VISIBLE_DEVICES": visible})] == expected


def test_a_release_waits_until_the_driver_has_freed_the_memory(play: Play) -> None:
    nvml = play(10 * GIB)
    nvml.processes = [{OURS: 10 * GIB}]

    def on_look(look: int) -> None:
        if look == 3:
            nvml.processes = [{OURS: 600 * MIB}]
        if look == 5:
            nvml.processes = [{OURS: 500 * MIB}]  # asleep, within the budget

    nvml.on_look = on_look
    outcome = wait_released([OURS])
    assert isinstance(outcome, Released) and outcome.how == "processes"
    assert nvml.looks == 5 and nvml.open == 0


def test_a_release_names_at_its_deadline_who_still_holds_memory(play: Play) -> None:
    nvml = play(10 * GIB, 0)
    nvml.processes = [{os.getpid(): 10 * GIB}, {}]
    outcome = wait_released([os.getpid()], deadline_s=0.05)
    assert isinstance(outcome, StillHeld) and not outcome.cancelled
    (held,) = outcome.held
    assert held.startswith("nvidia 0 (NVIDIA Play): 10240 MiB held by ") and f"({os.getpid()})" in held


def amd_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """The tool, which says what it is given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    tool = folder / "amd-smi"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "metric --mem-usage --json" ] || exit 9\ncat {tmp_path}/amd.json\n')
    tool.chmod(0o755)
    (tmp_path / "kfd_device").touch()
    return (tmp_path / "amd.json").write_text


AMD_SMI = """{
    "gpu_data": [
        {"gpu": 1, "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 284, "unit": "MB"},
                                 "free_vram": {"value": 196308, "unit": "MB"}, "total_visible_vram": "N/A"}},
        {"gpu": 0, "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 17153, "unit": "MB"}}}
    ]
}
"""
# ROCm 6 has the list alone.
AMD_SMI_6 = (
    AMD_SMI.strip().removeprefix("{").removesuffix("}").replace('"gpu_data":', "WARNING: no render group\n")
)
AS_AMD_SMI_SAYS = [
    Accelerator(0, "amd", "AMD 0", 196592 * MIB, 17153 * MIB),
    Accelerator(1, "amd", "AMD 1", 196592 * MIB, 284 * MIB),
]


@pytest.mark.parametrize("said", [AMD_SMI, AMD_SMI_6], ids=["7", "6"])
def test_amd_smi_is_understood_in_both_versions(said: str) -> None:
    assert accelerators.of_amd_smi(said) == AS_AMD_SMI_SAYS


def test_amd_devices_are_those_of_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say = amd_smi(tmp_path, monkeypatch)
    say(AMD_SMI)
    before = detect({})
    assert before == AS_AMD_SMI_SAYS
    say(AMD_SMI.replace("17153", "18153"))
    outcome = wait_released([OURS], before=before, environ={}, deadline_s=0.0)
    assert isinstance(outcome, StillHeld)
    assert outcome.held == ("amd 0 (AMD 0) uses 1000 MiB more than before",)
    for said in ('{"gpu_data": [{"gpu": 0, "mem_usage": "N/A"}]}', "[]", "nothing"):
        say(said)
        assert detect({}) == []
    say(AMD_SMI)
    # Without AMD's driver nobody is asked.
    (tmp_path / "kfd_device").unlink()
    assert detect({}) == []
