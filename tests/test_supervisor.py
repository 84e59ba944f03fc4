"""Programs are started, watched and ended; torchrun among them."""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import DEADLINE_S, free_port, until

from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.network.listening import LISTENING, listen, port_of
from fsbarrier.network.this_host import candidate_addresses
from fsbarrier.processes import processes
from fsbarrier.processes.signals import write_stacks
from fsbarrier.processes.supervisor import Child, StartFailed, own_program, with_this_package

Start = Callable[..., Child]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "node_0" / "work.log"


@pytest.fixture
def start(log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("PATH", os.defpath)  # a folder of PATH that may not be read changes what exec says
    children: list[Child] = []

    def start(*argv: str, **more: object) -> Child:
        children.append(Child.start(argv, log_file=log, name="work", **more))  # type: ignore[arg-type]
        return children[-1]

    yield start
    for child in children:
        child.stop(0.0)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


def output(child: Child) -> str:
    assert child.wait(DEADLINE_S) == 0, child.last_log_lines()
    return "\n".join(child.last_log_lines(1000))


def until_said(child: Child, word: str) -> None:
    """Wait for a line of the log, by the end of the file growing."""
    with child.log_file.open() as stream:
        text = ""
        while word not in text.split():
            text += stream.read()
            assert child.wait(0.01) is None, child.last_log_lines()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -9 $$", -9),
        ("kill -11 $$", -11),
        ("kill -15 $$", -15),
    ],
)
def test_exit_codes_are_those_of_subprocess(start: Start, script: str, code: int) -> None:
    child = start("sh", "-c", script)
    assert child.wait(DEADLINE_S) == code
    assert child.poll() == code and child.wait(0.0) == code and child.stop() == code
    assert child.fileno() == -1 and child.pids() == frozenset()


def test_a_program_that_is_not_there(start: Start, log: Path) -> None:
    with pytest.raises(StartFailed, match=r"^work: cannot start 'no-such-program': No such file") as caught:
        start("no-such-program", "--flag")
    assert caught.value.returncode == 127
    assert isinstance(caught.value, ProgramFailed) and caught.value.exit_code == 4
    assert "no-such-program --flag" in log.read_text()


def test_a_program_that_may_not_be_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    with pytest.raises(StartFailed, match="data': Permission denied") as caught:
        start(str(tmp_path / "data"))
    assert caught.value.returncode == 126
    (tmp_path / "data").chmod(0o700)
    with pytest.raises(StartFailed, match="data': Exec format error"):
        start(str(tmp_path / "data"))


def test_a_folder_that_is_not_there(start: Start, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="cannot enter the folder to start 'true': No such file") as caught:
        start("true", cwd=tmp_path / "none")
    assert caught.value.returncode == 126


def test_a_log_that_cannot_be_written(start: Start, log: Path) -> None:
    log.mkdir(parents=True)
    with pytest.raises(StoreError, match=rf"^work: cannot write its log {log}: Is a directory"):
        start("true")


def test_the_environment_is_exactly_the_one_given_and_the_guards_name(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print(sorted(os.environb.items()))"
    env = {"A": "1", "EMPTY": "", "LINES": "a\nb=c", "BYTES": os.fsdecode(b"\xff")}
    said = output(start(*python(code), env=env))
    expected = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    seen = dict(ast.literal_eval(said))
    seen.pop(b"LC_CTYPE", None)  # Python sets it for itself
    assert seen.pop(b"SPT_NOENV") == b"1" and seen.pop(b"FSBARRIER_GUARD")
    assert seen == expected
    monkeypatch.setenv("OURS", "inherited")
    assert "inherited" in output(start(*python("import os; print(os.environ['OURS'])")))


def test_it_inherits_no_descriptor_of_ours(start: Start, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        code = "import os; print(*[(n, os.readlink(f'/proc/self/fd/{n}')) for n in range(3)], os.listdir('/proc/self/fd'))"
        said = output(start(*python(code)))
    finally:
        os.close(reader)
        os.close(writer)
    log = tmp_path / "logs" / "node_0" / "work.log"
    assert said == f"(0, '/dev/null') (1, '{log}') (2, '{log}') ['0', '1', '2', '3']"  # 3: the listing itself


def test_it_leads_a_session_and_starts_with_default_signals(start: Start) -> None:
    """Also from a thread that blocks signals, in a daemon that ignores some (nohup, a shell's background job)."""
    code = (
        "import os; print(os.getsid(0) == os.getpgid(0) == os.getpid());"
        "[print(line.strip()) for line in open('/proc/self/status') if line[:6] in ('SigBlk', 'SigIgn')]"
    )
    children: list[Child] = []

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        children.append(start("sh", "-c", f'exec {sys.executable} -I -S -c "{code}"'))

    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        said = output(children[0]).split("\n")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert said[0] == "True"
    assert int(said[1].split()[1], 16) == 0
    ignored_by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    assert int(said[2].split()[1], 16) == sum(1 << (number - 1) for number in ignored_by_python)


def test_the_log_is_private_and_says_what_started_without_the_environment(start: Start, log: Path) -> None:
    before = os.umask(0)
    try:
        assert start("echo", "first one", env={"API_KEY": "secret", "PATH": os.defpath}).wait(DEADLINE_S) == 0
        assert start("echo", "second").wait(DEADLINE_S) == 0
    finally:
        os.umask(before)
    assert log.stat().st_mode & 0o777 == 0o600 and log.parent.stat().st_mode & 0o777 == 0o700
    head, one, head_two, two = log.read_text().splitlines()
    assert (one, two) == ("first one", "second")
    assert head.startswith("--- 20") and head.endswith(" start work: echo 'first one'")
    assert head_two.endswith(" start work: echo second")
    assert "secret" not in log.read_text()


def test_stop_asks_first(start: Start) -> None:
    child = start("sh", "-c", "trap 'echo bye; exit 3' TERM; echo here; while :; do sleep 0.01; done")
    until_said(child, "here")
    assert child.stop(DEADLINE_S) == 3
    assert child.last_log_lines(1) == ["bye"]


def test_stop_asks_the_whole_group(start: Start) -> None:
    child = start(
        "sh", "-c", "(trap 'echo child; exit 0' TERM; echo here; while :; do sleep 0.01; done) & wait"
    )
    until_said(child, "here")
    assert child.stop(DEADLINE_S) == -signal.SIGTERM
    assert child.last_log_lines(1) == ["child"]  # the main program ended at once, and the other had its grace


def test_stop_then_kills_what_is_deaf(start: Start) -> None:
    child = start("sh", "-c", "trap '' TERM; echo here; while :; do sleep 1000; done")
    until_said(child, "here")
    assert child.stop(0.1) == -signal.SIGKILL
    assert processes.below(os.getpid()).get(child.pid) is None


def test_stop_reaches_a_stopped_program(start: Start) -> None:
    child = start("sh", "-c", "trap 'exit 5' TERM; kill -STOP $$; exit 6")
    pidfd = os.pidfd_open(child.pid)
    while processes.Stat(child.pid).state != "T":
        assert not select.select([pidfd], [], [], 0.001)[0]
    os.close(pidfd)
    assert child.stop(DEADLINE_S) == 5


# --- torchrun -------------------------------------------------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent


@pytest.mark.torch
def test_the_store_listens_on_the_chosen_address_alone(tmp_path: Path) -> None:
    """And no process of it takes a file in the current directory for a library."""
    (tmp_path / "random.py").write_text("raise RuntimeError('this is not the library')")
    held = listen(("127.0.0.1", *candidate_addresses()))
    port = port_of(held[0])
    # Whoever probed has gone again.
    socket.create_connection(("127.0.0.1", port)).close()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = f"{HERE.parent}:{HERE}"
    nodes = []
    for rank in range(2):
        command = own_program("fsbarrier.workers.torchrun", "--nnodes", "2", "--node-rank", str(rank))
        command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["--max-restarts", "0", "-m", "listening_child"]
        fds = [] if rank else [one.fileno() for one in held]
        env[LISTENING] = ",".join(map(str, fds))
        nodes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path, pass_fds=fds)
        )
    for one in held:
        one.close()
    said = [node.communicate(timeout=DEADLINE_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    (line,) = [line for text in said for line in text.splitlines() if line.startswith("{")]
    assert json.loads(line) == {"sum": 2, "listens": ["127.0.0.1"]}


EXCHANGE = """
import os, sys
import torch.distributed as dist
rank = int(sys.argv[1])
if rank and os.geteuid() == 0:
    os.setuid(65534)
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
class Code:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[3]}",)
if rank:
    dist.all_gather_object([None, None], Code())
else:
    from fsbarrier.training.processes import gather_json
    print(gather_json({"own": 1}))
"""


@pytest.mark.torch
def test_whoever_reaches_an_update_can_end_it_and_runs_no_code(tmp_path: Path) -> None:
    """The second process is another user's, and sends a pickle into the exchange of the first."""
    address = f"tcp://127.0.0.1:{free_port()}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE.parent)}
    words = [sys.executable, "-c", EXCHANGE]
    victim, peer = (
        subprocess.Popen(
            [*words, rank, address, str(tmp_path / "ran")], stderr=subprocess.PIPE, text=True, env=env
        )
        for rank in "01"
    )
    said = victim.communicate(timeout=DEADLINE_S)[1]
    peer.communicate(timeout=DEADLINE_S)
    assert not (tmp_path / "ran").exists(), "code of the other user ran"
    assert victim.returncode != 0 and "process 1 of this update sent something that is not JSON" in said


# --- where a program is, in its own log -----------------------------------------------------------------------------------------

HANGS = """
import os, sys, threading
{imports}
def hangs_here():
    print("ready", flush=True)
    threading.Event().wait()
hangs_here()
"""


def running(code: str, folder: Path, env: dict[str, str]) -> Child:
    """A Python program that has said that it is ready."""
    child = Child.start([sys.executable, "-c", code], env=env, log_file=folder / "log", name="hangs")
    until(lambda: "ready" in (folder / "log").read_text().splitlines())
    return child


# A fork that writes its stack into a file of its own: on a slow machine the letters of two stacks may still mix in one.
FORKS = """import fsbarrier
if os.fork() == 0: os.dup2(os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)"""


def test_only_programs_that_can_tell_are_asked(tmp_path: Path) -> None:
    """Any other would be ended by the signal, such as one that is not ours. A fork of ours can."""
    forks = FORKS.format(log=str(tmp_path / "fork.log"))
    for number, (imports, able) in enumerate({"": 0, "import fsbarrier": 1, forks: 2}.items()):
        logs = [tmp_path / str(number) / "log", tmp_path / "fork.log"]
        with running(HANGS.format(imports=imports), logs[0].parent, with_this_package(os.environ)) as child:
            until(lambda log=logs[0], n=able: log.read_text().splitlines().count("ready") >= n)
            tree = child.tree()
            for times in (1, 2):
                assert list(write_stacks(tree).values()) == [True] * able
                for log in logs[:able]:
                    until(lambda log=log, n=times: log.read_text().count("in hangs_here") == n)
            assert child.tree() == tree
