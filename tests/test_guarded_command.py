"""`fsbarrier guard`: no process of a user's command outlives it, or whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from process_tree import ALL, DEADLINE_S, Fifo, Watched

from fsbarrier.processes.processes import scan

GUARD = [sys.executable, "-m", "fsbarrier", "guard"]
# Starts a guarded command as a supervisor would, and waits.
STARTER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


@pytest.fixture
def started(fifo: Fifo, watched: Watched) -> Iterator[list[int]]:
    """The process ids of a starter and the two guards; they and the command's whole tree are watched."""
    words = [sys.executable, "-c", STARTER, *GUARD, "--", *fifo.command(*ALL)]
    starter = subprocess.Popen(words)
    tree = fifo.pids(len(ALL) + 1)
    chain = [starter.pid]
    for _ in range(2):
        chain += children(chain[-1])
    assert len(chain) == 3
    watched.add(*tree, *chain)
    yield chain
    starter.kill()
    starter.wait()


def children(parent: int) -> list[int]:
    return [pid for pid, stat in scan().items() if stat.ppid == parent]


@pytest.mark.parametrize("killed", [0, 1, 2], ids=["who started it", "the outer guard", "the inner guard"])
def test_whoever_is_killed_nothing_stays(killed: int, started: list[int], watched: Watched) -> None:
    os.kill(started[killed], signal.SIGKILL)
    watched.wait_gone()


def test_processes_that_fork_for_ever_end_with_whoever_started_them(fifo: Fifo, watched: Watched) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *GUARD, "--", *fifo.command("bomb")])
    watched.add(*fifo.pids(40))
    watched.add(*children(starter.pid))
    starter.kill()
    starter.wait()
    watched.wait_gone()


def test_when_the_command_ends_what_it_left_is_ended_too(fifo: Fifo, watched: Watched) -> None:
    guard = subprocess.Popen([*GUARD, "--", *fifo.command(*ALL, "exit")])
    command, *left = sorted(fifo.pids(len(ALL) + 1))
    watched.add(command, *left)
    os.kill(command, signal.SIGUSR1)
    assert guard.wait(DEADLINE_S) == 7
    assert watched.alive() == []


SAYS_WHICH = """
import signal, sys
def ended(number, _):
    print(signal.Signals(number).name, flush=True)
    if sys.argv[1] == "obeys":
        sys.exit(9)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, ended)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("obeys", "code"), [("obeys", 9), ("ignores", 128 + signal.SIGKILL)])
def test_the_command_gets_the_signal_of_its_guard_and_then_little_time(
    number: signal.Signals, obeys: str, code: int
) -> None:
    grace = "60" if obeys == "obeys" else "0.2"
    words = [*GUARD, "--grace", grace, "--", sys.executable, "-c", SAYS_WHICH, obeys]
    guard = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert guard.stdout is not None and guard.stdout.readline() == "ready\n"
    guard.send_signal(number)
    assert guard.communicate(timeout=DEADLINE_S)[0] == f"{number.name}\n"
    assert guard.returncode == code


@pytest.mark.parametrize(
    ("words", "given", "code", "out", "error"),
    [
        (("--", "sh", "-c", "cat; exit 3"), "through", 3, "through", ""),
        (("--", "sh", "-c", "kill -9 $$"), "", 137, "", ""),
        (("--", "echo", "", "--help", "--", "-x"), "", 0, " --help -- -x\n", ""),
        (("--", "no-such-command"), "", 127, "", "fsbarrier: error: no-such-command: No such file or directory\n"),
        (("--", "/etc"), "", 126, "", "fsbarrier: error: /etc: Permission denied\n"),
        (("--",), "", 2, "", "fsbarrier: error: give a command: fsbarrier guard -- COMMAND\n"),
        (("sleep", "1"), "", 2, "", "fsbarrier: error: sleep: write the command after two dashes: fsbarrier guard -- COMMAND\n"),
        (("--grace", "-1", "--", "true"), "", 2, "", "fsbarrier: error: --grace -1.0: must be 0 or more seconds\n"),
    ],
)  # fmt: skip
def test_streams_exit_codes_and_mistakes(
    words: tuple[str, ...], given: str, code: int, out: str, error: str
) -> None:
    done = subprocess.run([*GUARD, *words], input=given, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, error)
