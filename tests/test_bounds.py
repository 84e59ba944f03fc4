"""What others can write is bounded, each with a line that says so: lines of tasks and journals, headers, records, connections."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsbarrier.cli import main
from fsbarrier.data.tasks import read_tasks
from fsbarrier.engine.model import tensors_in
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.journal import JournalReader


def test_a_task_file_that_is_a_hole_is_one_line_of_error(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="longer than 64 MiB"):
        read_tasks(path)


@pytest.mark.parametrize("shape", [["a"], "ab", [1.5], [-1], [[2]]])
def test_shapes_that_are_no_numbers_are_damage(tmp_path: Path, shape: object) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ProgramFailed, match="damaged: a tensor whose shape"):
        tensors_in(path)


def test_long_events_take_no_memory_and_are_named(tmp_path: Path) -> None:
    path, usual = (
        tmp_path / "journal.jsonl",
        {"time": "2026-01-01T00:00:00Z", "mono_s": 1.0, "event": "node_lost"},
    )
    usual |= {"node_rank": 0, "generation": 1, "iteration": 1, "phase": 0, "phase_name": "iteration_start"}
    short = json.dumps(usual).encode()
    longer = json.dumps({**usual, "log": list(range(20_000))}).encode()
    longest = json.dumps({**usual, "log": list(range(200_000))}).encode()
    path.write_bytes(b"\n".join([short, longest, *[longer] * 200, short, b""]))
    reader = JournalReader(path)
    found = list(reader.read())
    assert 100 < len(found) < 180 and "too long" in reader.fault
    assert found[-1].fields == usual, "what is short is still read"


@pytest.mark.parametrize(
    "change",
    [{"model": 3}, {"tasks": {"train": 1}}, {"tasks": {"train": {"path": 1, "count": "x", "sha256": ""}}}],
    ids=str,
)
def test_a_record_with_other_types_is_one_line(
    tmp_path: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["run", "--program", "ping", "--iterations", "1", "--log-path", str(run)]) == 0
    body = {**json.loads((run / "run.json").read_text()), **change}
    del body["digest"]
    body["digest"] = runrecord._digest(body)
    (run / "run.json").write_text(json.dumps(body))
    capsys.readouterr()
    assert main(["status", "--log-path", str(run)]) == 2
    assert "not a run's record" in capsys.readouterr().err


KNOCK = """
import encodings.idna, os, socket, sys
os.setuid(65534)
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
line.settimeout(20)
print(line.recv(1) == b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="connects as another user")
def test_another_users_connection_to_the_agents_port_is_closed_at_once() -> None:
    from fsbarrier.rollouts.agent_http import Endpoint

    async def knock() -> tuple[bytes, float]:
        endpoint = Endpoint()
        await endpoint.open()
        began = time.monotonic()
        words = [sys.executable, "-c", KNOCK, str(endpoint._port)]
        peer = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = await peer.communicate()
        took = time.monotonic() - began
        with socket.create_connection(("127.0.0.1", endpoint._port)) as own:
            own.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(own, b"GET / HTTP/1.0\r\n\r\n")
            answer = await asyncio.get_running_loop().sock_recv(own, 100)
        await endpoint.close()
        assert b" 401 " in answer, "its own user is answered"
        return said, took

    said, took = asyncio.run(knock())
    assert (b"True" in said or b"ConnectionResetError" in said) and took < 15
