"""The engine as the daemon uses it: against a stand-in server for what goes wrong, and with --all against the real vLLM.

Every day test_real_run.py serves, reloads and compares log-probabilities with the real one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_bench import (
    NEVER,
    SAMPLES,
    behaviour,
    largest_gap,
    make_model,
    roll_out,
    served,
    stand_in,
    write_model,
)
from test_accelerators import GIB, Nvml

from fsbarrier.engine import accelerators
from fsbarrier.engine.client import EngineClient
from fsbarrier.engine.engine import Engine
from fsbarrier.engine.model import inspect
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.processes import processes
from fsbarrier.rundir.known_logprobs import KnownLogprobs, KnownSequence
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import FrozenEngineSettings

Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes an engine whose server is fake_vllm.py, behaving as told."""
    script = stand_in(tmp_path)
    engines: list[Engine] = []

    def make(settings: dict[str, Any] | None = None, **mode: Any) -> Engine:
        monkeypatch.setenv("FAKE_VLLM", behaviour(tmp_path, **mode))
        resolved = resolve([], settings, cross_checks=False)
        engine = Engine(
            resolved.engine,
            external=not resolved.manages_engine,
            log_file=tmp_path / "vllm.log",
            work_dir=tmp_path / "work",
            python=script,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()


def lives(pid: int) -> bool:
    return pid in processes.scan()


def test_new_weights_go_into_the_running_server(tmp_path: Path, make: Make) -> None:
    engine = make()
    first, second = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    begin = time.monotonic()
    info = engine.ensure(first, 0, cancel=NEVER)
    assert 0 < info.seconds <= time.monotonic() - begin
    assert (info.action, info.model, served(info)) == ("started", "policy", str(first))
    assert info.api_key not in (tmp_path / "vllm.log").read_text() and info.api_key not in repr(info)
    again = engine.ensure(first, 0, cancel=NEVER)
    assert (again.action, again.pid, again.url) == ("kept", info.pid, info.url)
    link = tmp_path / "model.pt"
    link.symlink_to(second)
    reloaded = engine.ensure(link, 1, cancel=NEVER)
    assert (reloaded.action, reloaded.pid, reloaded.policy_version) == ("reloaded", info.pid, 1)
    assert served(reloaded) == str(second)
    assert engine.ensure(link, 2, cancel=NEVER).action == "reloaded"  # a copy in place may have changed
    assert engine.release(cancel=NEVER)["action"] == "keep" and engine.state == "up"
    engine.stop()
    assert engine.state != "up" and not lives(info.pid)
    assert engine.release(cancel=NEVER) == {"action": "none", "reason": "no server is running"}


@pytest.mark.parametrize("cut", [False, True])
def test_a_tied_model_is_served_with_a_head_of_its_own_and_reloaded(
    tmp_path: Path, make: Make, cut: bool
) -> None:
    """Else vLLM would keep the old head. The policy's own folder stays as it is."""
    engine = make()

    def model(name: str, value: int) -> Path:
        folder = write_model(tmp_path / name, tied=True, head=False, model_type="qwen2")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-32] + bytes([value]) * 32)
        if cut:
            weights.rename(folder / "model-1.safetensors")
            places = {"weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(places))
        return folder

    started = engine.ensure(model("a", 1), 0, cancel=NEVER)
    before = {path.name: path.read_bytes() for path in model("b", 2).iterdir()}
    assert engine.ensure(tmp_path / "a", 0, cancel=NEVER).action == "kept"
    reloaded = engine.ensure(tmp_path / "b", 1, cancel=NEVER)
    assert (reloaded.action, reloaded.pid, reloaded.note) == ("reloaded", started.pid, "")
    (folder,) = (tmp_path / "work" / "served").iterdir()
    assert served(reloaded) == str(folder) and not inspect(folder).tied
    assert (folder / "model-head.safetensors").read_bytes().endswith(bytes([2]) * 32)
    assert inspect(folder).parameters == 2 * inspect(tmp_path / "b").parameters
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    (weights,) = (tmp_path / "b").glob("*.safetensors")
    weights.write_bytes(before[weights.name][:-32] + bytes([3]) * 32)
    other = engine.ensure(tmp_path / "b", 2, cancel=NEVER)
    assert (Path(served(other)) / "model-head.safetensors").read_bytes().endswith(bytes([3]) * 32)


def known(each: float = -0.01, compared: int = 80) -> KnownLogprobs:
    """What a trainer says that the stand-in computes; `each`: the log-probability of a token, by its number."""
    ids = tuple(range(2, 2 + compared + 3))
    logprobs = (None, None, None, *(t * each for t in ids[3:]))
    return KnownLogprobs(0.05, (KnownSequence(ids, logprobs), KnownSequence((9, 5), (None, 5 * each))))


WRONG = (
    "does not serve the weights of policy version {}, or computes otherwise than the trainer: its log-probabilities differ by {} on "
    "average, more than 0.05 (algorithm.max_logprob_gap)"
)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_reload_that_garbles_the_weights_is_found_and_the_server_restarted(
    tmp_path: Path, make: Make, kind: str
) -> None:
    folders = [write_model(tmp_path / name, model_type=kind) for name in ("a", "b", "c")]
    engine = make(reload="garble")
    assert engine.ensure(folders[0], 0, cancel=NEVER).note == ""
    after = engine.ensure(folders[1], 1, cancel=NEVER, known=known())
    assert (after.action, after.note) == ("started", f"restarted: {WRONG.format(1, '0.4401')}")
    assert engine.ensure(folders[1], 1, cancel=NEVER, known=known()).action == "kept"
    # It is not tried again.
    after = engine.ensure(folders[2], 2, cancel=NEVER, known=known())
    why = f"this vLLM does not serve a {kind} model rightly after a reload in place"
    assert (after.action, after.note) == ("started", f"restarted: {why}")
    asked = (tmp_path / "fake" / "requests.jsonl").read_text()
    assert (asked.count('"/collective_rpc"'), asked.count('"prompt_logprobs"')) == (1, 3)


@pytest.mark.parametrize("first", ["started", "reloaded"])
def test_a_server_that_computes_something_else_than_the_trainer_is_never_used(
    tmp_path: Path, make: Make, first: str
) -> None:
    engine, folder = make(), write_model(tmp_path / "b")
    if first == "reloaded":
        assert engine.ensure(write_model(tmp_path / "a"), 6, cancel=NEVER, known=known()).action == "started"
    for _ in range(2):
        with pytest.raises(ProgramFailed) as caught:
            engine.ensure(folder, 7, cancel=NEVER, known=known(-0.03))
        # A line of the server's log may follow, about whatever it was doing when it was ended.
        assert str(caught.value).startswith(f"vLLM {WRONG.format(7, '0.8802')}")
        assert engine.state == "off"
    starts = (tmp_path / "vllm.log").read_text().count("starting")
    assert starts == (3 if first == "reloaded" else 2)
    assert engine.ensure(folder, 7, cancel=NEVER, known=known()).action == "started"


def test_a_difference_in_a_few_tokens_is_weighed_as_one_of_few(tmp_path: Path, make: Make) -> None:
    """A single token is off by 0.9 here, as bfloat16 may have it."""
    few = KnownLogprobs(0.05, (KnownSequence((9, 10, 20), (None, -0.1, -1.1)),))
    assert make().ensure(write_model(tmp_path / "a"), 1, cancel=NEVER, known=few).action == "started"


def test_an_architecture_that_nobody_tested_is_reloaded_once_that_can_be_compared(
    tmp_path: Path, make: Make
) -> None:
    engine, folders = (
        make(),
        [write_model(tmp_path / str(number), model_type="qwen3_moe") for number in range(5)],
    )
    first = engine.ensure(folders[0], 0, cancel=NEVER)
    unknown = "whether vLLM reloads a qwen3_moe model rightly is not known yet"
    second = engine.ensure(folders[1], 1, cancel=NEVER)
    assert (second.action, second.note) == ("started", f"restarted: {unknown}") and second.pid != first.pid
    kept = engine.ensure(folders[2], 2, cancel=NEVER, in_flight=True, known=known())
    assert (kept.action, kept.note) == ("kept", f"keeps its weights: {unknown}")
    third = engine.ensure(folders[2], 2, cancel=NEVER, known=known())
    assert (third.action, third.note, third.pid) == ("reloaded", "", second.pid)
    assert engine.ensure(folders[3], 3, cancel=NEVER, in_flight=True, known=known()).action == "reloaded"
    assert engine.ensure(folders[4], 4, cancel=NEVER).action == "reloaded"


@pytest.mark.parametrize(
    ("change", "mode", "note"),
    [
        ({"tied": True, "head": False, "model_type": "gemma2"}, {}, "tied to the embedding"),
        ({"width": 16}, {}, "another configuration or other shapes"),
        ({}, {"reload": "error"}, "HTTP 500: no memory"),
        ({}, {"reload": "warn"}, "did not load all weights"),
        ({}, {"reload": "die"}, "/collective_rpc: "),
    ],
)
def test_where_a_reload_is_not_known_to_be_right_the_server_is_restarted(
    tmp_path: Path, make: Make, change: dict[str, Any], mode: dict[str, Any], note: str
) -> None:
    engine = make(**mode)
    first = engine.ensure(write_model(tmp_path / "a"), 0, cancel=NEVER)
    second = engine.ensure(write_model(tmp_path / "b", **change), 1, cancel=NEVER)
    assert second.action == "started" and second.pid != first.pid and not lives(first.pid)
    assert second.note.startswith("restarted: ") and (
        note in second.note or note == "Connection reset by peer"
    )
    assert served(second) == str(tmp_path / "b")


class Card(Nvml):
    """An accelerator on which a server holds 30 GiB until it sleeps or ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0)
        self.log, self.stays = folder / "fake" / "requests.jsonl", False
        self.on_look = self.measure

    def posts(self) -> list[str]:
        """What the servers were asked for, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [str(json.loads(line)["path"]) for line in lines]

    def measure(self, look: int) -> None:
        changes = [
            path for path in self.posts() if "sleep" in path or "kv_cache" in path or path == "/wake_up"
        ]
        running = any("/fake_vllm.py" in " ".join(p.cmdline()) for p in psutil.Process().children(True))
        self.used = [30 * GIB if self.stays or (running and "sleep" not in "".join(changes[-1:])) else GIB]


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", card)
    monkeypatch.setattr(accelerators, "_in_the_hosts_pid_namespace", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return card


def test_a_server_sleeps_while_the_trainer_has_the_accelerator(
    tmp_path: Path, make: Make, card: Card
) -> None:
    """Its weights are discarded: those it had are loaded again too."""
    engine, first = make(), write_model(tmp_path / "a")
    started = engine.ensure(first, 0, cancel=NEVER)
    woken = [
        *("/wake_up?tags=weights", "/pause?mode=abort", "/collective_rpc"),
        *("/wake_up?tags=kv_cache", "/update_weight_version", "/resume"),
    ]
    for folder in (first, write_model(tmp_path / "b")):
        before = len(card.posts())
        released = engine.release(cancel=NEVER)
        assert (released["action"], released["seen"]) == ("sleep", "level") and card.used == [GIB]
        back = engine.ensure(folder, 1, cancel=NEVER)
        assert (back.action, back.pid, served(back)) == ("reloaded", started.pid, str(folder))
        assert card.posts()[before:] == ["/sleep?level=2", *woken]


def test_a_frozen_model_keeps_its_weights_while_it_sleeps(
    tmp_path: Path, make: Make, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one with a tied head, since nothing is loaded again."""
    monkeypatch.setenv("FAKE_VLLM", behaviour(tmp_path))
    model = write_model(tmp_path / "a", tied=True, head=False)
    engine = Engine(
        FrozenEngineSettings(),
        log_file=tmp_path / "vllm-judge.log",
        work_dir=tmp_path / "work",
        python=make().python,
        served_name="judge",
        api_key="known",
    )
    try:
        started = engine.ensure(model, 0, cancel=NEVER)
        assert (started.model, started.api_key, served(started)) == ("judge", "known", str(model))
        assert engine.release(cancel=NEVER)["action"] == "sleep" and card.used == [GIB]
        back = engine.ensure(model, 0, cancel=NEVER)
        assert (back.action, back.pid) == ("woken", started.pid)
        assert card.posts() == ["/sleep?level=1", "/wake_up"]
        assert engine.ensure(model, 0, cancel=NEVER).action == "kept"
    finally:
        engine.stop()


def test_a_server_that_cannot_sleep_is_stopped_and_its_memory_looked_at(
    tmp_path: Path, make: Make, card: Card
) -> None:
    engine = make(sleep="error")
    info = engine.ensure(write_model(tmp_path / "a"), 0, cancel=NEVER)
    released = engine.release(cancel=NEVER)
    assert released["action"] == "stop" and "insomnia" in str(released["reason"]) and not lives(info.pid)
    # A model with a tied head is started again anyway.
    engine.ensure(write_model(tmp_path / "b", tied=True, head=False, model_type="gemma2"), 1, cancel=NEVER)
    card.stays, cancelled = True, threading.Event()
    cancelled.set()
    with pytest.raises(ProgramFailed, match=r"vLLM was stopped .* accelerator memory not free .*nvidia 0"):
        engine.release(cancel=cancelled)


def test_a_server_that_was_killed_is_started_again(tmp_path: Path, make: Make) -> None:
    engine = make()
    first = engine.ensure(write_model(tmp_path / "a"), 0, cancel=NEVER)
    os.kill(first.pid, signal.SIGKILL)
    second = engine.ensure(tmp_path / "a", 0, cancel=NEVER)
    assert second.action == "started" and second.note.startswith("restarted: vLLM ")


def test_damaged_weights_never_reach_the_server(tmp_path: Path, make: Make) -> None:
    engine = make()
    info = engine.ensure(write_model(tmp_path / "a"), 0, cancel=NEVER)
    broken = write_model(tmp_path / "b") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(ProgramFailed, match=": damaged"):
        engine.ensure(tmp_path / "b", 1, cancel=NEVER)
    assert engine.state == "up" and served(info) == str(tmp_path / "a")


def test_a_server_that_does_not_start_is_told_with_its_reason_and_its_log(tmp_path: Path, make: Make) -> None:
    engine = make(start="fail")
    with pytest.raises(ProgramFailed) as caught:
        engine.ensure(write_model(tmp_path / "a"), 0, cancel=NEVER)
    first, *rest = str(caught.value).splitlines()
    reason = "ValueError: the head size 17 is not supported"
    assert first == f"vLLM ended with exit code 1: {reason}"
    assert rest[0] == f"(from {tmp_path / 'vllm.log'})" and len(rest) >= 3
    assert engine.state != "up"


def test_the_server_is_reached_through_a_socket_that_nobody_else_can_reach(
    tmp_path: Path, make: Make
) -> None:
    engine = make()
    info = engine.ensure(write_model(tmp_path / "a"), 0, cancel=NEVER)
    path = Path(info.url.removeprefix("unix:"))
    assert path.is_socket() and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    held = [connection for connection in psutil.Process(info.pid).net_connections() if connection.laddr]
    assert not [connection for connection in held if connection.status == psutil.CONN_LISTEN]
    engine.stop()
    assert path.parent == tmp_path / "work" or not path.parent.exists()


def test_a_start_ends_at_its_deadline(tmp_path: Path, make: Make) -> None:
    engine = make({"engine.start_timeout_s": 0.5}, start="hang")
    with pytest.raises(ProgramFailed, match=r"vLLM did not answer within 0\.5 s \(engine\.start_timeout_s\)"):
        engine.ensure(write_model(tmp_path / "a"), 0, cancel=NEVER)


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_start_can_be_called_off(tmp_path: Path, make: Make, how: str) -> None:
    engine, cancel = make(start="hang"), threading.Event()
    model, failures = write_model(tmp_path / "a"), []

    def work() -> None:
        try:
            engine.ensure(model, 0, cancel=cancel)
        except ProgramFailed as error:
            failures.append(str(error).splitlines()[0])

    thread = threading.Thread(target=work)
    thread.start()
    while not (tmp_path / "fake" / "hanging").exists() and thread.is_alive():
        thread.join(0.01)
    cancel.set() if how == "cancel" else engine.stop()
    thread.join(60)
    assert failures == ["vLLM was stopped during its start"] and engine.state != "up"


def test_in_debug_mode_the_server_is_asked_and_never_told(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make().ensure(write_model(tmp_path / "a"), 0, cancel=NEVER)
    monkeypatch.setenv("MY_KEY", own.api_key)
    engine = make({"debug_mode": True, "engine.url": own.url, "engine.api_key_env": "MY_KEY"})
    info = engine.ensure(tmp_path / "a", 3, cancel=NEVER)
    assert (info.action, info.url, info.api_key, info.model) == ("external", own.url, own.api_key, "policy")
    assert info.note == ""
    other = engine.ensure(write_model(tmp_path / "b"), 4, cancel=NEVER)
    assert f"serves {tmp_path / 'a'}, not policy version 4" in other.note
    assert engine.release(cancel=NEVER)["action"] == "external"
    engine.stop()
    assert lives(own.pid) and served(own) == str(tmp_path / "a")
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UsageError, match=r"engine\.api_key_env=MY_KEY: this variable is not set"):
        engine.ensure(tmp_path / "a", 4, cancel=NEVER)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        engine = make({"debug_mode": True, "engine.url": f"http://127.0.0.1:{nobody.getsockname()[1]}"})
        with pytest.raises(ProgramFailed, match=r"debug mode .* does not answer: .* refused"):
            engine.ensure(tmp_path / "a", 4, cancel=NEVER)


# --- the real vLLM ----------------------------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_vllm_serves_reloads_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    first, second = make_model(tmp_path / "first", 1), make_model(tmp_path / "second", 2)
    settings = resolve([], {"rollout.max_tokens": 8})
    engine = Engine(settings.engine, log_file=tmp_path / "vllm.log", work_dir=tmp_path / "work")
    try:
        info = engine.ensure(first, 0, cancel=NEVER)
        everybody = processes.below(os.getpid())
        # Its processes' own sockets are no more in the way of other users than the one where it listens.
        assert not [path for path in temporary.rglob("*") if path.is_socket()]
        prompts = ["ba=", "dcba=", [{"role": "user", "content": "fedc"}], "a" * 200]
        said, made = roll_out(tmp_path / "one", info, 0, prompts[:3])
        assert (
            said == "" and len(made) == 3 * SAMPLES and any(item["finish_reason"] == "stop" for item in made)
        )
        for item in made:
            ids, sampled = item["token_ids"].tolist(), item["token_ids"].tolist()[item["prompt_tokens"] :]
            assert (
                len(ids)
                == len(item["logprobs"])
                == len(item["loss_mask"])
                == item["prompt_tokens"] + len(sampled)
            )
            assert (sampled[-1] == 1) == (item["finish_reason"] == "stop") and item["valid"]
            assert item["prompt_tokens"] == len(item["messages"][0]["content"]) + isinstance(
                item["prompt"], list
            )
        assert len({tuple(item["token_ids"]) for item in made if item["task_index"] == 0}) > 1
        assert largest_gap(first, made, 0.7) < 1e-4 < largest_gap(second, made, 0.7)

        reloaded = engine.ensure(second, 1, cancel=NEVER)
        assert (reloaded.action, reloaded.pid, reloaded.note) == ("reloaded", info.pid, "")
        said, made = roll_out(tmp_path / "two", reloaded, 1, prompts[:3])
        assert largest_gap(second, made, 0.7) < 1e-4 < largest_gap(first, made, 0.7)

        rpc = EngineClient(info.url, "wrong key")
        with pytest.raises(Exception, match="401"):
            rpc.call("POST", "/collective_rpc", {"method": "check_health"}, timeout_s=30)

        os.kill(info.pid, signal.SIGKILL)
        tied = [make_model(tmp_path / f"tied{seed}", seed, tied=True) for seed in (3, 4)]
        back = engine.ensure(tied[0], 2, cancel=NEVER)
        assert back.action == "started" and back.note.startswith("restarted: vLLM ")
        assert engine.ensure(tied[1], 3, cancel=NEVER).action == "reloaded"
        said, made = roll_out(tmp_path / "tied", back, 3, prompts[:3])
        assert largest_gap(tied[1], made, 0.7) < 1e-4 < largest_gap(tied[0], made, 0.7)
        said, made = roll_out(tmp_path / "three", back, 3, [prompts[0], prompts[3]])
        assert said.startswith("task 1: the engine rejects it: HTTP 400: ") and "context length" in said
        assert [item["finish_reason"] == "error" for item in made].count(True) == SAMPLES
        everybody |= processes.below(os.getpid())
    finally:
        engine.stop()
    left = {
        pid for pid, start in everybody.items() if (stat := processes.scan().get(pid)) and stat.start == start
    }
    assert not left
