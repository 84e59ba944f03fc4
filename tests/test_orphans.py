"""What is left when a daemon and its guard are killed at once is ended by the next start, and nothing else is.

Tests beside these may end these orphans too, so only their end is asserted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_tree import ALL, DEADLINE_S, Daemon, Fifo, Watched, kill_at_once

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
    pids = fifo.pids(len(ALL) + 1)
    watched.add(*pids)
    kill_at_once(first.process.pid, first.guards[0])
    survivors = set(pids) - {first.mains[0]}  # the kernel ends the program itself
    assert set(watched.alive()) >= survivors
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
    assert orphans.end_orphans() == {}
    fifo.assert_alive(pids)


@pytest.mark.parametrize("change", ["guard lives", "pid namespace", "nonsense"])
def test_a_name_that_means_a_living_guard_or_somebody_elses_ends_nobody(change: str, fifo: Fifo) -> None:
    namespace, pid, start = processes.own_name().split("-")
    name = {"guard lives": f"{namespace}-{pid}-{start}", "pid namespace": f"1-{pid}-1", "nonsense": "-1"}
    bystander = subprocess.Popen(fifo.command(), env={**os.environ, processes.GUARD_VARIABLE: name[change]})
    try:
        pids = fifo.pids(1)
        assert orphans.end_orphans() == {}
        fifo.assert_alive(pids)
    finally:
        bystander.kill()
        bystander.wait()


def test_a_pid_that_changed_hands_is_no_guard(fifo: Fifo) -> None:
    namespace, pid, start = processes.own_name().split("-")
    name = f"{namespace}-{pid}-{int(start) - 1}"
    with subprocess.Popen(fifo.command(), env={**os.environ, processes.GUARD_VARIABLE: name}) as orphan:
        fifo.pids(1)
        orphans.end_orphans()
        assert orphan.wait(DEADLINE_S) == -signal.SIGKILL
