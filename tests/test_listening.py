"""What listens, attacked by another user of the machine, and by whoever has no key."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from other_user import needs_root, start_as_other
from waiting import DEADLINE_S, until

from fsbarrier.cli.start import node_checks
from fsbarrier.cli.start.node_checks import private_network_problem
from fsbarrier.context import Span
from fsbarrier.engine import span as spans
from fsbarrier.engine.frozen import FrozenEngine
from fsbarrier.engine.span import HeadListener
from fsbarrier.loader import load_program
from fsbarrier.network import listening
from fsbarrier.network.listening import LOOPBACK, listen
from fsbarrier.processes.supervisor import Child, own_program, with_this_package
from fsbarrier.rollouts.environment import Environment
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import EnvironmentSettings

KEY = "of this start"

# --- the gateway of frozen engines ----------------------------------------------------------------------------------------------


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FrozenEngine]:
    """A gateway whose only server answers each request with "served"."""
    path = tmp_path / "s"
    server = listening.on_path(path)

    def serve() -> None:
        with server:
            while True:
                connection, _ = server.accept()
                with connection:
                    if not connection.recv(1 << 16).startswith(b"GET"):
                        return
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nserved")

    thread = threading.Thread(target=serve)
    thread.start()
    replicas = SimpleNamespace(frozen="rm", api_key=KEY, engines=[], stop=lambda: None)
    engine = FrozenEngine(replicas, LOOPBACK)  # type: ignore[arg-type]
    engine._sockets = (str(path),)
    yield engine
    engine.stop()
    with socket.socket(socket.AF_UNIX) as last:
        last.connect(str(path))
        last.sendall(b"end")
    thread.join()


def asked(engine: FrozenEngine, key: str) -> httpx.Response:
    return httpx.get(
        f"http://127.0.0.1:{engine.port}/v1/models",
        headers={"Authorization": f"Bearer {key}"},
        timeout=60.0,
        trust_env=False,
    )


# Opens a thousand connections that say nothing, and says how many of them were closed by the other end.
IDLE = """
import resource, select, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
lines, closed = [], 0
for _ in range(1000):
    one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    lines.append(one)
for one in lines:
    one.settimeout(20)
    try:
        closed += one.recv(1) == b""
    except ConnectionError:
        closed += 1
    except TimeoutError:
        break
print(closed, flush=True)
input()
"""


@needs_root
def test_idle_connections_of_another_user_take_no_descriptors(gateway: FrozenEngine) -> None:
    """A daemon without descriptors writes no heartbeat."""
    other = start_as_other(IDLE, str(gateway.port))
    assert other.stdout is not None
    assert other.stdout.readline() == "1000\n"
    assert asked(gateway, KEY).text == "served"
    other.communicate("\n")


def test_connections_without_the_key_are_few_and_end(
    gateway: FrozenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "KEY_S", 3600.0)
    monkeypatch.setattr(listening, "MOST_WITHOUT_KEY", 4)
    silent = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(5)]
    # The oldest goes, and nobody else waits for those that stay.
    assert silent[0].recv(1) == b""
    assert asked(gateway, KEY).text == "served"
    assert asked(gateway, "wrong").status_code == 401
    for one in silent:
        one.close()
    monkeypatch.setattr(listening, "KEY_S", 0.05)
    with socket.create_connection(("127.0.0.1", gateway.port)) as late:
        late.sendall(b"GET / HTTP/1.1\r\n")
        assert late.recv(1) == b""


def test_connections_leave_descriptors_to_the_daemon(
    gateway: FrozenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the key may have many connections, but not all that this process can open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(listening, "RESERVED", soft - 4)
    lines = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(3)]
    assert lines[2].recv(1) == b""
    for one in lines:
        one.close()


# --- where the nodes of an engine find each other -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [b"", b"[" * 4000 + b"\n", b'{"key":"\\ud800","nodes":[],"place":1,"reached":[]}\n', b"x" * 100_000],
    ids=["nothing", "brackets", "half a pair", "no end"],
)
def test_whoever_comes_without_the_key_holds_up_nobody(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "HELLO_S", 3600.0)
    nodes = ((0, 1), (1, 1))
    held = listen(LOOPBACK)
    head_listener = HeadListener(held)
    port, key = head_listener.offer["port"], str(head_listener.offer["key"])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    for one in silent:
        try:
            one.sendall(said)
        except ConnectionError:
            pass
    over = threading.Event()
    with ThreadPoolExecutor() as pool:
        head = pool.submit(
            head_listener.gather,
            Span(nodes, 0, LOOPBACK, port, key, (1, 1, 1)),
            time.monotonic() + 60,
            over.is_set,
        )
        link, meeting = spans.meet(
            Span(nodes, 1, LOOPBACK, port, key, (1, 1, 1)), time.monotonic() + 60, over.is_set
        )
        came, told = head.result()
    assert told.port == meeting.port and meeting.place == 1
    for end in (link, *came, *silent, *held):
        end.close()


# --- the port of an environment's server ----------------------------------------------------------------------------------------

# Waits until the other user has the port, at its first start.
SERVER = """
import http.server, os, pathlib, sys
port, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
# A pipe whose other end the thief opens.
open(folder / "taken").close()
class Ours(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ours")
try:
    server = http.server.HTTPServer(("127.0.0.1", port), Ours)
except OSError:
    # As a server that tries again, so that nothing but its port tells.
    import signal
    signal.pause()
server.serve_forever()
"""
# Reads the port from the command line that everybody can see, and answers there.
THIEF = """
import http.server, pathlib, sys
script, taken = sys.argv[1], pathlib.Path(sys.argv[2])
port = 0
while not port:
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode("latin-1").split("\\0")
        except OSError:
            continue
        # The guard's command line has it first.
        if script in words and words[words.index(script) + 1].isdigit():
            port = int(words[words.index(script) + 1])
class Theirs(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"theirs")
server = http.server.HTTPServer(("127.0.0.1", port), Theirs)
pipe = taken.open("w")
server.serve_forever()
"""


@needs_root
@pytest.mark.parametrize("health", [None, "/health"])
def test_whoever_takes_the_port_of_an_environment_gets_no_episode(health: str | None, tmp_path: Path) -> None:
    folder = Path("/tmp") / f"fsbarrier-test-{time.monotonic_ns()}"
    folder.mkdir()
    folder.chmod(0o1777)
    os.mkfifo(folder / "taken")
    (folder / "taken").chmod(0o666)
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    thief = start_as_other(THIEF, script, folder / "taken")
    settings = EnvironmentSettings(
        command=f"{sys.executable} {script} {{port}} {folder}", health=health, restarts=0
    )

    async def use() -> tuple[str, list[str]]:
        async with Environment(settings, tmp_path) as environment, environment.session() as session:
            async with httpx.AsyncClient(trust_env=False) as http:
                answer = (await http.get(session.url)).text
            return answer, [str(event["why"]) for event in environment.events]

    try:
        answer, why = asyncio.run(use())
    finally:
        thief.kill()
        thief.communicate()
        (folder / "taken").unlink(missing_ok=True)
        folder.rmdir()
    assert answer == "ours"
    assert why == ["did not get its port: user id 64123 listens on it"], json.dumps(why)


# --- programs with a network of their own ---------------------------------------------------------------------------------------

# As gloo: listens on loopback, and takes whoever connects first.
TRUSTING = """
import os, pathlib, socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    path = pathlib.Path(sys.argv[1])
    path.with_suffix(".new").write_text(f"{server.getsockname()[1]} {os.geteuid()}")
    path.with_suffix(".new").rename(path)
    if sys.argv[2:]:
        # Its own processes reach it.
        socket.create_connection(server.getsockname()).close()
    server.accept()
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1]))).close()
    print("let in")
except ConnectionRefusedError:
    print("refused")
"""


@needs_root
def test_other_users_reach_no_program_with_a_network_of_its_own(tmp_path: Path) -> None:
    """gloo asks nobody who connects, and vLLM's workers unpickle what it brings."""
    if why := private_network_problem():
        pytest.skip(f"this machine gives programs no network of their own: {why}")
    for private, expected in ((False, "let in\n"), (True, "refused\n")):
        told = tmp_path / f"port-{private}"
        argv = [sys.executable, "-c", TRUSTING, str(told)]
        child = Child.start(argv, log_file=tmp_path / "log", name="gloo", private_network=private)
        until(told.exists)
        port, uid = told.read_text().split()
        assert int(uid) == os.geteuid()
        assert start_as_other(CONNECT, port).communicate()[0] == expected
        child.stop(0.0)
    argv = [sys.executable, "-c", TRUSTING, str(told), "itself"]
    child = Child.start(argv, log_file=tmp_path / "log", name="gloo", private_network=True)
    assert child.wait(60.0) == 0


# One process of an update: says where it and its torchrun listen, and goes on when it is told to.
TRAINS = """
import os, pathlib, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    rows = [row.split() for row in pathlib.Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    mine = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in (os.getpid(), os.getppid()) for fd in os.listdir(f"/proc/{pid}/fd")
            if os.path.lexists(f"/proc/{pid}/fd/{fd}")}
    ports = [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    path = pathlib.Path(sys.argv[1])
    path.with_suffix(".new").write_text(" ".join(map(str, [int(total), *ports])))
    path.with_suffix(".new").rename(path)
    open(sys.argv[2]).close()
dist.barrier()
dist.destroy_process_group()
"""


@needs_root
@pytest.mark.torch
def test_other_users_reach_no_process_of_an_update_on_one_node(tmp_path: Path) -> None:
    """torchrun's store asks for no key, and whoever connects to gloo first is taken for another process of the update."""
    if why := private_network_problem():
        pytest.skip(f"this machine gives programs no network of their own: {why}")
    script, go_on = tmp_path / "trains.py", tmp_path / "go-on"
    script.write_text(TRAINS)
    os.mkfifo(go_on)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for private, expected in ((False, "let in\n"), (True, "refused\n")):
        told = tmp_path / f"ports-{private}"
        argv = own_program(
            "fsbarrier.workers.torchrun", "--nnodes", "1", "--node-rank", "0", "--nproc-per-node"
        )
        argv += ["2", "--master-addr", "127.0.0.1", "--master-port", "0", str(script), str(told), str(go_on)]
        child = Child.start(
            argv,
            env=with_this_package(env),
            log_file=tmp_path / "log",
            name="update",
            private_network=private,
        )
        until(told.exists, lambda: (tmp_path / "log").read_text(), lives=partial(alive, child))
        processes, *ports = told.read_text().split()
        assert processes == "2" and len(ports) > 1
        for port in ports:
            assert start_as_other(CONNECT, port).communicate()[0] == expected
        go_on.open("w").close()
        assert child.wait(DEADLINE_S) == 0


def alive(child: Child) -> bool:
    return child.poll() is None


ENGINES = "other users of this host can run code in this run: its engines "
UPDATES = "other users of this host can falsify its updates: they "
TRUST = "(%s.private_network=false says that you trust these users)"
FORBIDDEN = "get no network of their own (Operation not permitted) "


@pytest.mark.parametrize(
    ("chosen", "why", "expected"),
    [
        ({}, "", ""),
        ({}, "Operation not permitted", UPDATES + FORBIDDEN + TRUST % "trainer"),
        ({"num_nodes": 2}, "", UPDATES + "span nodes " + TRUST % "trainer"),
        ({"num_nodes": 2, "trainer.private_network": False}, "Operation not permitted", ""),
        ({"rl_phase": "rollout"}, "Operation not permitted", ""),
        ({"trainer.command": "mine"}, "Operation not permitted", ""),
        (
            {"engine.tensor_parallel_size": 2, "trainer.private_network": False},
            "Operation not permitted",
            ENGINES + FORBIDDEN + TRUST % "engine",
        ),
        ({"engine.tensor_parallel_size": 2}, "", ""),
        (
            {"engine.tensor_parallel_size": 2, "engine.nodes": 2, "num_nodes": 2},
            "",
            f"{ENGINES}span nodes {TRUST % 'engine'}; {UPDATES}span nodes {TRUST % 'trainer'}",
        ),
        (
            {
                "engine.tensor_parallel_size": 2,
                "engine.private_network": False,
                "trainer.private_network": False,
            },
            "Operation not permitted",
            "",
        ),
    ],
)
def test_a_start_says_once_what_other_users_of_the_host_can_do(
    chosen: dict[str, object], why: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = resolve([], {"model": "m", **chosen}, cross_checks=False)
    program = load_program("rl")
    monkeypatch.setattr(node_checks, "private_network_problem", lambda: why)
    monkeypatch.setattr(node_checks, "others_may_be_here", lambda: True)
    assert node_checks.exposed(settings, program) == expected
    monkeypatch.setattr(node_checks, "others_may_be_here", lambda: False)
    assert node_checks.exposed(settings, program) == ""
