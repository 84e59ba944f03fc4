"""All engines of a node: where each computes, what is done to all of them at once, and what becomes of one that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_bench import NEVER, behaviour, served, stand_in, write_model
from waiting import until

from fsbarrier.engine.accelerators import Accelerator
from fsbarrier.engine.placement import check_arguments, placements
from fsbarrier.engine.replicas import Replicas
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import EngineSettings

Make = Callable[..., Replicas]


def devices(count: int, kind: Any = "nvidia") -> list[Accelerator]:
    return [Accelerator(index, kind, "card", 80 << 30, 0) for index in range(count)]


def settings(**chosen: Any) -> EngineSettings:
    values = {f"engine.{name}": value for name, value in chosen.items()}
    return resolve([], values, cross_checks=False).engine


def seen(engine: EngineSettings, there: list[Accelerator], **environ: str) -> list[str | None]:
    """What each replica's CUDA_VISIBLE_DEVICES would be."""
    return [
        one.environment(environ).get("CUDA_VISIBLE_DEVICES")
        for one in placements(engine, there, environ, [0, 1])
    ]


def test_every_accelerator_rolls_out() -> None:
    assert seen(settings(), devices(8)) == [str(number) for number in range(8)]
    assert seen(settings(tensor_parallel_size=2), devices(8)) == ["0,1", "2,3", "4,5", "6,7"]
    assert seen(settings(tensor_parallel_size=3), devices(8)) == ["0,1,2", "3,4,5"]
    assert seen(settings(replicas=2), devices(8)) == ["0", "1"]
    # The node itself may use some only: their numbers are the driver's.
    assert seen(settings(), devices(8)[4:6], CUDA_VISIBLE_DEVICES="4,5") == ["4", "5"]
    hip = [
        each.environment({"CUDA_VISIBLE_DEVICES": "9"})
        for each in placements(settings(), devices(2, "amd"), {}, [0])
    ]
    assert hip == [{"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"}]
    (placed,) = placements(settings(), devices(1), {}, [0])
    assert placed.environment({})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_what_does_not_fit_on_a_node_is_refused_with_what_does() -> None:
    with pytest.raises(
        UsageError,
        match=r"tensor_parallel_size=16: .* 8 accelerators; use 8 or fewer, or a larger engine\.nodes",
    ):
        placements(settings(tensor_parallel_size=16), devices(8), {}, [0])
    with pytest.raises(
        UsageError, match=r"replicas=5: .* need 10 accelerators, but this node has 8; use 4 or fewer"
    ):
        placements(settings(tensor_parallel_size=2, replicas=5), devices(8), {}, [0])
    for words in (["--nnodes", "2"], ["--pipeline-parallel-size=2"], ["-dp", "4"]):
        with pytest.raises(
            UsageError, match=rf"engine\.extra_args: {words[0].partition('=')[0]}: not supported"
        ):
            check_arguments(settings(extra_args=words))
    check_arguments(settings(extra_args=["--max-num-seqs", "512"]))


# --- against stand-ins ------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes replicas whose servers are fake_vllm.py, behaving as told."""
    script = stand_in(tmp_path)
    made: list[Replicas] = []

    def make(count: int, **mode: Any) -> Replicas:
        monkeypatch.setenv("FAKE_VLLM", behaviour(tmp_path, **mode))
        replicas = Replicas(
            settings(replicas=count),
            log_dir=tmp_path / "logs",
            work_dir=tmp_path / "work",
            python=script,
        )
        made.append(replicas)
        return replicas

    yield make
    for replicas in made:
        replicas.stop()


def test_all_of_them_serve_the_same_weights(tmp_path: Path, make: Make) -> None:
    replicas = make(3)
    first, second = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    ready: list[int] = []
    infos = replicas.ensure(first, 0, threads=6, cancel=NEVER, show=ready.append)
    assert [info.action for info in infos] == ["started"] * 3 and ready == [1, 2, 3]
    assert len({(info.url, info.api_key, info.pid) for info in infos}) == 3
    assert [engine.threads for engine in replicas.engines] == [2, 2, 2]
    # With the same seed all of them would say the same.
    words = [psutil.Process(info.pid).cmdline() for info in infos]
    assert len({each[each.index("--seed") + 1] for each in words}) == 3
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == ["vllm-1.log", "vllm-2.log", "vllm.log"]
    again = replicas.ensure(second, 1, cancel=NEVER)
    assert [info.action for info in again] == ["reloaded"] * 3
    assert [served(info) for info in again] == [str(second)] * 3
    assert replicas.release(cancel=NEVER) == {
        "action": "keep",
        "reason": "no accelerator, so no memory needs to be freed",
    }
    # One that does not reload is restarted alone.
    os.kill(infos[1].pid, signal.SIGKILL)
    third = replicas.ensure(first, 3, cancel=NEVER)
    assert [info.action for info in third] == ["reloaded", "started", "reloaded"]
    assert third[1].note.startswith("restarted: vLLM ") and third[1].url == infos[1].url


def test_an_engine_that_does_not_come_up_fails_all_and_is_named(tmp_path: Path, make: Make) -> None:
    replicas = make(2)
    broken = write_model(tmp_path / "a") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(ProgramFailed, match=r"^engine 0: .*: damaged"):
        replicas.ensure(tmp_path / "a", 0, cancel=NEVER)


def test_an_engine_that_dies_is_back_with_the_next_start(tmp_path: Path, make: Make) -> None:
    replicas = make(2)
    replicas.ensure(write_model(tmp_path / "first"), 0, cancel=NEVER)
    infos = replicas.ensure(write_model(tmp_path / "a"), 1, cancel=NEVER)
    os.kill(infos[1].pid, signal.SIGKILL)
    until(lambda: replicas.engines[1].ended)
    assert replicas.none_left() == "", "the first one serves on"
    kept, again = replicas.ensure(tmp_path / "a", 1, cancel=NEVER)
    assert (kept.action, again.action) == ("kept", "started") and again.url == infos[1].url
    assert again.note.startswith("restarted: vLLM was ended by signal 9 (SIGKILL")
    assert served(again) == served(kept) == str(tmp_path / "a")
    for info in (kept, again):
        os.kill(info.pid, signal.SIGKILL)
    until(replicas.none_left)
    assert "signal 9" in replicas.none_left()
