"""The engine's pure parts and its edges: commands, model folders, HTTP, the key."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_bench import TINY, write_model

from fsbarrier.engine import command as engine_command
from fsbarrier.engine.client import CalledOff, EngineClient, Unreachable, normal_url
from fsbarrier.engine.command import ServerPlan
from fsbarrier.engine.model import inspect
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.settings.resolve import resolve
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
