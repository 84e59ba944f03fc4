"""What others can write is bounded, each with a line that says so: lines of tasks and journals, headers, records, connections."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from other_user import needs_root, start_as_other

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


# Connects as another user, from each kind of socket and address, and says how each connection ended.
KNOCK = """
import socket, sys
for family, host, source in ((2, "127.0.0.1", ""), (2, "127.0.0.1", "127.0.0.9"), (10, "::ffff:127.0.0.1", "")):
    line = socket.socket(family)
    line.bind((source, 0))
    line.settimeout(20)
    try:
        line.connect((host, int(sys.argv[1])))
        line.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        print("answered" if line.recv(9) else "closed")
    except ConnectionError:
        print("closed")
"""


@needs_root
def test_another_users_connections_to_the_agents_port_are_closed_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fsbarrier.rollouts.agent_http import Endpoint

    async def knock() -> tuple[str, str, list[bytes]]:
        endpoint = Endpoint()
        await endpoint.open()
        other = start_as_other(KNOCK, str(endpoint._port))
        said, errors = await asyncio.to_thread(other.communicate)
        own = []
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
            reader, writer = await asyncio.open_connection(host, endpoint._port, family=family)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            own.append(await reader.read(13))
            writer.close()
        await endpoint.close()
        return said, errors, own

    said, errors, own = asyncio.run(knock())
    assert said == "closed\n" * 3, errors
    assert own == [b"HTTP/1.1 401 "] * 2, "its own user is answered"
    assert "closed a connection of user id 64123 (from 127.0.0.1" in capsys.readouterr().out


def test_connections_without_a_key_are_bounded_in_number_and_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oldest make room; who has shown the key stays."""
    from fsbarrier.rollouts import agent_http

    monkeypatch.setattr(agent_http, "KEYLESS_S", 3)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, usual[1]))

    async def crowd() -> list[bytes]:
        endpoint = agent_http.Endpoint()
        await endpoint.open()
        head = f"GET /episode/x/v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint._key}\r\n"
        asked = f"{head}Content-Length: 0\r\n\r\n".encode()
        (reader, with_key), *others = [
            await asyncio.open_connection("127.0.0.1", endpoint._port) for _ in range(2)
        ]
        endpoint._clients["x"] = cast(Any, SimpleNamespace(model="m"))
        with_key.write(asked)
        first = await reader.read(13)
        others += [await asyncio.open_connection("127.0.0.1", endpoint._port) for _ in range(120)]
        assert await others[0][0].read() == b"", "the oldest makes room at once"
        assert await others[-1][0].read() == b"", "and all the others in time"
        await reader.readuntil(b'"model"}]}')
        with_key.write(asked)
        again = await reader.readuntil(b'"model"}]}')
        for _, writer in [(reader, with_key), *others]:
            writer.close()
        await endpoint.close()
        return [first, again]

    try:
        first, again = asyncio.run(crowd())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert first == b"HTTP/1.1 200 " and b" 200 " in again
    said = capsys.readouterr().out
    assert "without a key, because there were more than 100 of them" in said
    assert "that has shown no key for 3 s" in said and said.count("closed a connection") == 2
