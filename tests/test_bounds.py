"""What others can write is bounded, each with a line that says so: lines of tasks and journals, headers, records, connections."""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from other_user import needs_root, start_as_other

from fsbarrier.data.tasks import read_tasks
from fsbarrier.errors import UsageError


def test_a_task_file_that_is_a_hole_is_one_line_of_error(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="longer than 64 MiB"):
        read_tasks(path)


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


# Connects from one port to many addresses of its own: the kernel lists the connections of one port in an order of its own.
CONNECTED = """
import socket
server, lines, port = socket.create_server(("", 0)), [], 0
for number in range(1, 100):
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    line.bind(("127.0.0.1", port))
    line.connect((f"127.0.0.{number}", server.getsockname()[1]))
    port = line.getsockname()[1]
    lines.append(line)
print(port, flush=True)
input()
"""


@needs_root
def test_a_connection_from_a_port_that_another_user_has_too_is_answered() -> None:
    """One local address may have connections of several users, to different places."""
    from fsbarrier.rollouts.agent_http import Endpoint

    other = start_as_other(CONNECTED)
    assert other.stdout is not None

    async def ask(port: int) -> bytes:
        endpoint = Endpoint()
        await endpoint.open()
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        line.bind(("127.0.0.1", port))
        line.setblocking(False)
        await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", endpoint._port))
        reader, writer = await asyncio.open_connection(sock=line)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        said = await reader.read(13)
        writer.close()
        await endpoint.close()
        return said

    try:
        assert asyncio.run(ask(int(other.stdout.readline()))) == b"HTTP/1.1 401 "
    finally:
        other.communicate("\n")


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
