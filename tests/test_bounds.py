"""What others can write is bounded, each with a line that says so: lines of tasks and journals, headers, records, connections."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

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
