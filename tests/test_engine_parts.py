"""The engine's pure parts and its edges: commands, model folders, HTTP, the key; and all engines of a node: where each computes, and what
becomes of one that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_bench import NEVER, TINY, behaviour, served, stand_in, write_model
from waiting import until

from fsbarrier.engine import command as engine_command
from fsbarrier.engine.accelerators import Accelerator
from fsbarrier.engine.client import CalledOff, EngineClient, Unreachable, normal_url
from fsbarrier.engine.command import ServerPlan
from fsbarrier.engine.model import inspect
from fsbarrier.engine.placement import check_arguments, placed, placements
from fsbarrier.engine.replicas import Replicas
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import EngineSettings
from fsbarrier.workers.vllm_server import KeyGuard


def plan(folder: Path, *, accelerated: bool = False, **changes: Any) -> ServerPlan:
    settings = resolve([], {f"engine.{name}": value for name, value in changes.items()}, cross_checks=False)
    return ServerPlan(
        python="python3",
        model=inspect(folder),
        settings=settings.engine,
        socket="/private/vllm.sock",
        seed=7,
        accelerated=accelerated,
        sleeps=False,
        memory_bytes=8 << 30,
        threads=6,
    )


def flags(words: list[str]) -> dict[str, str]:
    return {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}


# --- the command ----------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_server_starts_lean_and_serves_no_more_than_the_model_can(tmp_path: Path) -> None:
    words = engine_command.argv(plan(write_model(tmp_path / "m")))
    found = flags(words)
    assert found["--uds"] == "/private/vllm.sock" and not {"--host", "--port"} & set(words)
    assert found["--dtype"] == "float32" and found["--max-model-len"] == "256"
    assert found["--kv-cache-memory-bytes"] == str(64 << 20)
    assert found["--generation-config"] == "vllm" and found["--logprobs-mode"] == "processed_logprobs"
    assert "--enforce-eager" in words and "--gpu-memory-utilization" not in words
    assert found["--model"] == str(tmp_path / "m") and found["--seed"] == "7"


def test_on_an_accelerator_the_settings_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    chosen = {"dtype": "float16", "gpu_memory_utilization": 0.4, "tensor_parallel_size": 2}
    words = engine_command.argv(plan(folder, accelerated=True, extra_args=["--max-num-seqs", "5"], **chosen))
    found = flags(words)
    assert (found["--dtype"], found["--gpu-memory-utilization"]) == ("float16", "0.4")
    assert (found["--tensor-parallel-size"], found["--max-num-seqs"]) == ("2", "5")
    assert flags(engine_command.argv(plan(folder, accelerated=True)))["--dtype"] == "bfloat16"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(words)


def test_the_environment_has_the_key_and_nothing_of_other_launchers(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "VLLM_CPU_KVCACHE_SPACE": "",
        "NO_PROXY": "example.org",
        "OMP_NUM_THREADS": "5",
    }
    small = plan(write_model(tmp_path / "m"))
    env = engine_command.environment(small, environ, "secret")
    assert env["VLLM_API_KEY"] == "secret" and env["PATH"] == "/bin" and env["OMP_NUM_THREADS"] == "5"
    assert not {"RANK", "WORLD_SIZE", "VLLM_PORT", "VLLM_CPU_KVCACHE_SPACE"} & env.keys()
    assert env["NO_PROXY"] == env["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert (
        engine_command.environment(small, {}, "secret")["OMP_NUM_THREADS"] == "1"
    )  # a small model: no more helps
    assert not any("secret" in word for word in engine_command.argv(small))
    # The sockets between vLLM's processes, which would lie in the temporary directory otherwise.
    assert env["VLLM_RPC_BASE_PATH"] == str(Path(small.socket).parent)
    # And what vLLM and torch write there, or take from there as code.
    assert env["TMPDIR"] == str(Path(small.socket).parent)


# --- model folders ----------------------------------------------------------------------------------------------------------


def test_a_tied_output_head_is_recognised(tmp_path: Path) -> None:
    assert not inspect(write_model(tmp_path / "a", tied=False)).tied
    assert inspect(write_model(tmp_path / "b", tied=True)).tied
    assert not inspect(write_model(tmp_path / "c", tied=None)).tied
    assert inspect(write_model(tmp_path / "d", tied=None, head=False)).tied
    inner: dict[str, Any] = {"text_config": {**TINY, "tie_word_embeddings": True}}
    assert inspect(write_model(tmp_path / "e", tied=None, **inner)).tied


def test_weights_fit_into_a_running_model_of_the_same_shapes_only(tmp_path: Path) -> None:
    first = inspect(write_model(tmp_path / "a", transformers_version="5.1"))
    same = inspect(write_model(tmp_path / "b", transformers_version="5.2"))
    assert first.signature == same.signature is not None and first.parameters == 16
    other: dict[str, dict[str, Any]] = {"w": {"width": 16}, "h": {"head": False}, "c": {"rope_theta": 1e6}}
    for name, changes in other.items():
        assert inspect(write_model(tmp_path / name, **changes)).signature != first.signature
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "b")
    assert inspect(link).path == tmp_path / "b"
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "pytorch_model.bin")
    assert inspect(tmp_path / "a").signature is None


def test_a_damaged_model_folder_is_named_before_the_engine_sees_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content, message in (
        (whole[:-1], r"model\.safetensors: damaged: \d+ bytes instead of \d+"),
        (b"", ": damaged: no header"),
        (whole[:8] + b"x" * (len(whole) - 8), ": damaged"),
    ):
        file.write_bytes(content)
        with pytest.raises(ProgramFailed, match=message):
            inspect(folder)
    file.unlink()
    with pytest.raises(ProgramFailed, match="no weights"):
        inspect(folder)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "model-00001-of-00002.safetensors"}}'
    )
    with pytest.raises(ProgramFailed, match=r"model-00001-of-00002\.safetensors is missing"):
        inspect(folder)
    with pytest.raises(ProgramFailed, match=r"config\.json: cannot be read"):
        inspect(tmp_path / "none")


# --- HTTP -------------------------------------------------------------------------------------------------------------------


def test_a_silent_server_cannot_hold_a_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unreachable, match="timeout"):
            EngineClient(url).call("GET", "/x", timeout_s=0.01)
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(CalledOff):
            EngineClient(url).call("GET", "/x", timeout_s=600, cancel=cancel)
        with pytest.raises(Unreachable, match="the server exited"):
            EngineClient(url, ended=lambda: True).call("GET", "/x", timeout_s=600)


def test_addresses_in_the_forms_that_people_give() -> None:
    for text in ("http://h:8000", "http://h:8000/", "h:8000", "http://h:8000/v1", "http://h:8000/v1/"):
        assert normal_url(text) == "http://h:8000"
    assert normal_url("https://h/proxy/v1") == "https://h/proxy"
    for text in ("", "ftp://h", "http://", "http://h:port", "http://h/?x=1"):
        with pytest.raises(UsageError, match=r"engine\.url="):
            normal_url(text)


def test_without_the_key_only_the_health_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope.get("path", scope["type"]))

    def ask(path: str, *values: bytes, kind: str = "http") -> list[Any]:
        sent: list[Any] = []

        async def send(event: Any) -> None:
            sent.append(event)

        scope = {"type": kind, "path": path, "headers": [(b"authorization", value) for value in values]}
        asyncio.run(KeyGuard(app)(scope, None, send))
        return sent

    for path in ("/collective_rpc", "/sleep", "/v1/models", "/health/x", "/metrics", "//health"):
        for values in ((), (b"Bearer wrong",), (b"secret",), (b"Bearer secret", b"Bearer wrong")):
            assert ask(path, *values)[0]["status"] == 401
    assert ask("/ws", kind="websocket")[0]["type"] == "websocket.close"
    assert passed == []
    assert ask("/health") == ask("/collective_rpc", b"Bearer secret") == ask("", kind="lifespan") == []
    assert passed == ["/health", "/collective_rpc", ""]
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(ValueError, match="empty"):
        KeyGuard(app)


# --- all engines of a node ----------------------------------------------------------------------------------------------------


Make = Callable[..., Replicas]


def devices(count: int, kind: Any = "nvidia") -> list[Accelerator]:
    return [Accelerator(index, kind, "card", 80 << 30, 0) for index in range(count)]


def settings(**chosen: Any) -> EngineSettings:
    values = {f"engine.{name}": value for name, value in chosen.items()}
    return resolve([], values, cross_checks=False).engine


def seen(engine: EngineSettings, there: list[Accelerator], **environ: str) -> list[str | None]:
    """What each replica's CUDA_VISIBLE_DEVICES would be."""
    return [
        placed(environ, one).get("CUDA_VISIBLE_DEVICES") for one in placements(engine, there, environ, [0, 1])
    ]


def test_every_accelerator_rolls_out() -> None:
    assert seen(settings(), devices(8)) == [str(number) for number in range(8)]
    assert seen(settings(tensor_parallel_size=2), devices(8)) == ["0,1", "2,3", "4,5", "6,7"]
    assert seen(settings(tensor_parallel_size=3), devices(8)) == ["0,1,2", "3,4,5"]
    assert seen(settings(replicas=2), devices(8)) == ["0", "1"]
    # The node itself may use some only: their numbers are the driver's.
    assert seen(settings(), devices(8)[4:6], CUDA_VISIBLE_DEVICES="4,5") == ["4", "5"]
    hip = [
        placed({"CUDA_VISIBLE_DEVICES": "9"}, each)
        for each in placements(settings(), devices(2, "amd"), {}, [0])
    ]
    assert hip == [{"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"}]
    (first,) = placements(settings(), devices(1), {}, [0])
    assert placed({}, first)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


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
