"""What is left when a daemon and its guard are killed at once is ended by the next start, and nothing else is.

Tests beside these may end these orphans too, so only their end is asserted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_tree import ALL, Daemon, Fifo, Watched, kill_at_once

from fsbarrier.processes import orphans, processes


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def run(*commands: list[str]) -> Daemon:
        daemons.append(Daemon(tmp_path, *commands))
        return daemons[-1]

    yield run
    for daemon in daemons:
        daemon.close()


def test_the_next_start_kills_what_a_guard_left_behind(
    run: Callable[..., Daemon], fifo: Fifo, watched: Watched
) -> None:
    first = run(fifo.command(*ALL))
    watched.add(*fifo.pids(len(ALL) + 1))
    kill_at_once(first.process.pid, first.guards[0])
    run(fifo.command())
    fifo.pids(1)
    watched.wait_gone()


TITLED = """
import os, setproctitle
setproctitle.setproctitle("VLLM::EngineCore" + "x" * 5000)
os.fork() or os.setsid()
"""


def test_a_process_that_set_its_title_is_found(
    run: Callable[..., Daemon], fifo: Fifo, watched: Watched
) -> None:
    """As vLLM's engine core does, which survives its server."""
    tell = f"import signal; open({str(fifo.path)!r}, 'w').write('%d\\n' % os.getpid()); signal.pause()"
    first = run([sys.executable, "-c", TITLED + tell])
    pids = fifo.pids(2)
    watched.add(*pids)
    kill_at_once(first.process.pid, first.guards[0])
    orphans.end_orphans()
    watched.wait_gone()


def test_a_living_daemons_processes_stay(run: Callable[..., Daemon], fifo: Fifo) -> None:
    first = run(fifo.command("session"))
    pids = fifo.pids(2)
    assert first.ask() == ["polled", "None"]
    run(fifo.command())
    pids += fifo.pids(1)
    assert not orphans.end_orphans().keys() & {*pids}
    fifo.assert_alive(pids)


LEAVE = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"


def left_to_init(fifo: Fifo, guard: str) -> int:
    """A process whose parent has died, and which names this guard."""
    argv = [sys.executable, "-I", "-S", "-c", LEAVE, *fifo.command()]
    subprocess.run(argv, env={**os.environ, processes.GUARD_VARIABLE: guard}, check=True)
    return fifo.pids(1)[0]


def dead_guard() -> str:
    name, start = processes.own_name().rsplit("/", 1)
    return f"{name}/{int(start) - 1}"


def test_a_pid_that_changed_hands_is_no_guard(fifo: Fifo, watched: Watched) -> None:
    watched.add(left_to_init(fifo, dead_guard()))
    orphans.end_orphans()
    watched.wait_gone()


@pytest.mark.parametrize("change", ["it lives", "another host", "another pid namespace", "nonsense"])
def test_a_guard_that_lives_or_is_elsewhere_ends_nobody(change: str, fifo: Fifo, watched: Watched) -> None:
    boot, namespace, pid, start = dead_guard().split("/")
    names = {
        "it lives": processes.own_name(),
        "another host": f"{boot[::-1]}/{namespace}/{pid}/{start}",
        "another pid namespace": f"{boot}/pid:[1]/{pid}/{start}",
        "nonsense": "-/1",
    }
    bystander = left_to_init(fifo, names[change])
    watched.add(bystander)
    assert bystander not in orphans.end_orphans()
    fifo.assert_alive([bystander])


def test_what_a_service_was_asked_to_start_stays(fifo: Fifo) -> None:
    """It has the environment of a program of ours, as with tmux or Slurm, but its parent is the service: here this process."""
    env = {**os.environ, processes.GUARD_VARIABLE: dead_guard()}
    with subprocess.Popen(fifo.command(), env=env) as bystander:
        pids = fifo.pids(1)
        orphans.end_orphans()
        fifo.assert_alive(pids)
        bystander.kill()
