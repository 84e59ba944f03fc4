"""Nothing that a daemon starts outlives it: its guard, and the next start."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, all_gone, command_lines, leftovers, rolled_out_twice
from process_tree import ALL, DAEMON, DEADLINE_S, ROOT, Daemon, Fifo, Watched, kill_at_once

from fsbarrier.processes import guard, orphans, processes
from fsbarrier.processes.supervisor import Child

Start = Callable[[list[str]], Child]
RunDaemon = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a child of this very process."""
    children: list[Child] = []

    def start(argv: list[str]) -> Child:
        children.append(Child.start(argv, log_file=tmp_path / "log", name="tree"))
        return children[-1]

    yield start
    for child in children:
        child.stop(0.0)


@pytest.fixture
def run_daemon(tmp_path: Path) -> Iterator[RunDaemon]:
    """Starts a daemon with one child for each command."""
    daemons: list[Daemon] = []

    def run(*commands: list[str], terminal: int | None = None, **env: str) -> Daemon:
        daemons.append(Daemon(tmp_path, *commands, terminal=terminal, **env))
        return daemons[-1]

    yield run
    for daemon in daemons:
        daemon.close()


def test_a_killed_daemon_takes_every_kind_of_descendant_along(
    run_daemon: RunDaemon, fifo: Fifo, watched: Watched
) -> None:
    daemon = run_daemon(fifo.command(*ALL), fifo.command(*ALL))
    watched.add(*fifo.pids(2 * (len(ALL) + 1)))
    watched.add(*daemon.guards)
    assert len(watched.alive()) == 2 * (len(ALL) + 1) + 2
    daemon.kill()
    watched.wait_gone()


def test_other_peoples_processes_stay_also_when_they_are_named_alike(
    run_daemon: RunDaemon, fifo: Fifo, watched: Watched
) -> None:
    foreign = subprocess.Popen([*fifo.command("exit"), "vllm", "fsbarrier"])
    try:
        assert fifo.pids(1) == [foreign.pid]
        daemon = run_daemon([*fifo.command("session"), "vllm", "fsbarrier"])
        watched.add(*fifo.pids(2))
        daemon.kill()
        watched.wait_gone()
        assert foreign.poll() is None
        foreign.send_signal(signal.SIGUSR1)  # it lives, and does what it is asked
        assert foreign.wait(DEADLINE_S) == 7
    finally:
        foreign.kill()
        foreign.wait()


def test_a_stopped_daemon_costs_nobody_their_life(
    run_daemon: RunDaemon, fifo: Fifo, watched: Watched
) -> None:
    daemon = run_daemon(fifo.command("plain", "session"))
    pids = fifo.pids(3)
    watched.add(*pids)
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED)
    fifo.assert_alive(pids)
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.ask() == ["polled", "None"]
    fifo.assert_alive(pids)


def test_a_daemon_killed_while_it_is_stopped_takes_its_tree_along(
    run_daemon: RunDaemon, fifo: Fifo, watched: Watched
) -> None:
    daemon = run_daemon(fifo.command("daemonised"))
    watched.add(*fifo.pids(2))
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED)
    daemon.kill()
    watched.wait_gone()


def test_what_the_daemon_forked_does_not_keep_the_tree_alive(
    run_daemon: RunDaemon, fifo: Fifo, watched: Watched
) -> None:
    daemon = run_daemon(fifo.command("session"), LEAK="1")
    leak = Watched()
    leak.add(daemon.leak)
    try:
        watched.add(*fifo.pids(2))
        daemon.kill()
        watched.wait_gone()
        assert leak.alive() == [daemon.leak]  # it holds our end of the line, and is nobody's to end
    finally:
        leak.close()


def test_with_its_guard_killed_the_daemon_ends_the_tree(fifo: Fifo, watched: Watched, start: Start) -> None:
    child = start(fifo.command(*ALL))
    watched.add(*fifo.pids(len(ALL) + 1))
    os.kill(child.guard_pid, signal.SIGKILL)
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    watched.wait_gone()


def test_with_daemon_and_guard_killed_the_program_ends(
    run_daemon: RunDaemon, fifo: Fifo, watched: Watched
) -> None:
    """What it started is ended by the next start (below)."""
    daemon = run_daemon(fifo.command())
    watched.add(*fifo.pids(1))
    kill_at_once(daemon.guards[0], daemon.process.pid)
    watched.wait_gone()


def test_a_stopped_guard_still_obeys(fifo: Fifo, watched: Watched, start: Start) -> None:
    child = start(fifo.command(*ALL))
    watched.add(*fifo.pids(len(ALL) + 1))
    os.kill(child.guard_pid, signal.SIGSTOP)
    assert child.stop(0.2) == -signal.SIGTERM
    assert watched.alive() == []


def test_when_the_program_ends_what_it_left_is_ended(fifo: Fifo, watched: Watched, start: Start) -> None:
    child = start(fifo.command(*ALL, "exit"))
    watched.add(*fifo.pids(len(ALL) + 1))
    os.kill(child.pid, signal.SIGUSR1)
    assert child.wait(DEADLINE_S) == 7
    assert watched.alive() == []


def test_a_tree_that_forks_for_ever_is_ended_by_stop(fifo: Fifo, watched: Watched, start: Start) -> None:
    child = start(fifo.command("bomb"))
    watched.add(*fifo.pids(40), child.guard_pid)
    child.stop(0.0)
    assert watched.alive() == []  # the guard ends last, when waitpid told it that nobody is left
    assert not living(fifo)


def test_a_tree_that_forks_for_ever_is_ended_with_its_daemon(
    run_daemon: RunDaemon, fifo: Fifo, watched: Watched
) -> None:
    daemon = run_daemon(fifo.command("bomb"))
    watched.add(*fifo.pids(40), daemon.guards[0])
    daemon.kill()
    watched.wait_gone()
    assert not living(fifo)


def living(fifo: Fifo) -> list[int]:
    """Who has the FIFO's path among its arguments: every process of a tree, and nobody else."""
    found = []
    for pid in processes.scan():
        with contextlib.suppress(OSError):
            if str(fifo.path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


@pytest.mark.parametrize("number", guard.ENDING)
def test_a_signal_from_outside_to_the_guard_ends_the_tree(
    number: int, fifo: Fifo, watched: Watched, start: Start
) -> None:
    child = start(fifo.command("plain", "session"))
    watched.add(*fifo.pids(3))
    os.kill(child.guard_pid, number)
    assert child.wait(DEADLINE_S) == -signal.SIGTERM
    assert watched.alive() == []


def test_ctrl_c_reaches_the_daemon_and_not_its_programs(
    run_daemon: RunDaemon, fifo: Fifo, watched: Watched
) -> None:
    """The terminal signals its whole foreground group; the programs are in sessions of their own."""
    keyboard, terminal = os.openpty()
    try:
        daemon = run_daemon(fifo.command("plain", "session"), terminal=terminal)
        pids = fifo.pids(3)
        watched.add(*pids)
        os.write(keyboard, b"\x03")
        assert daemon.line().split() == ["interrupted", "polled", "None"]
        fifo.assert_alive(pids)
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_a_thread_that_ends_takes_no_program_along(fifo: Fifo, start: Start) -> None:
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(start(fifo.command("plain"))))
    thread.start()
    thread.join()
    fifo.assert_alive(fifo.pids(2))
    assert children[0].poll() is None


def test_children_started_at_once_do_not_hold_each_others_lines(start: Start) -> None:
    """A copy of one's line in another would hide the daemon's end from its guard."""
    for _ in range(5):
        children: list[Child] = []
        go = threading.Barrier(4)

        def begin(go: threading.Barrier = go, children: list[Child] = children) -> None:
            go.wait(DEADLINE_S)
            children.append(start([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]))

        threads = [threading.Thread(target=begin) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for child in children[:-1]:
            one = Watched()
            one.add(child.pid, child.guard_pid)
            cut(child)
            one.wait_gone()
            one.close()
        assert children[-1].poll() is None
        assert children[-1].stop() == -signal.SIGTERM


def cut(child: Child) -> None:
    """What its guard sees when we die."""
    child._socket.shutdown(1)


def test_a_pid_that_changed_hands_is_not_signalled(fifo: Fifo, start: Start) -> None:
    child = start(fifo.command())
    [pid] = fifo.pids(1)
    born = processes.Stat(pid).start
    assert not processes.send(pid, born - 1, signal.SIGKILL)
    fifo.assert_alive([pid])
    assert processes.send(pid, born, signal.SIGTERM)
    assert child.wait(DEADLINE_S) == -signal.SIGTERM
    assert not processes.send(pid, born, signal.SIGKILL)


CONTAINER = """
import os, sys
root, daemon_code, folder, command = sys.argv[1:]
sys.path.insert(0, root)
daemon = os.fork()
if daemon == 0:
    os.execv(sys.executable, [sys.executable, "-c", daemon_code, root, folder, command])
sys.stdin.readline()
os.kill(daemon, 9)
reaped = []
while True:  # as PID 1 should; the kernel kills nobody for us while we live
    try:
        reaped.append(os.wait()[0])
    except ChildProcessError:
        break
from fsbarrier.processes import processes
print("left", sorted(set(processes.scan()) - {1}), "reaped", len(reaped))
"""


def test_in_a_container_it_works_as_outside(tmp_path: Path, fifo: Fifo) -> None:
    """A pid namespace of its own, with the guard as PID 1's grandchild."""
    enter = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*enter, "true"], capture_output=True).returncode != 0
    ):
        pytest.skip("cannot make a pid namespace here")
    argv = [sys.executable, "-c", CONTAINER, str(ROOT), DAEMON, str(tmp_path), "\t".join(fifo.command(*ALL))]
    with subprocess.Popen(
        [*enter, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            fifo.pids(len(ALL) + 1)
            out, _ = process.communicate("\n", timeout=DEADLINE_S)
        finally:
            process.kill()
    assert "left [] reaped 2" in out  # the daemon and its guard: all else was the guard's to reap


# --- what a guard left ----------------------------------------------------------------------------------------------------------


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


# --- with a real engine ---------------------------------------------------------------------------------------------------------

SMALL = ("rollout.tasks=256", "rollout.samples=8", "eval.tasks=8", "coordination.beat_s=0.5")
PAUSE = "import signal; signal.pause()"
FOREIGN = (("vllm", "serve", "VLLM::EngineCore"), ("fsbarrier.workers.torchrun", "fsbarrier.workers.rollout"))


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_daemon_takes_its_engine_and_programs_along(tmp_path: Path) -> None:
    foreign = [
        subprocess.Popen([sys.executable, "-c", PAUSE, *words], start_new_session=True) for words in FOREIGN
    ]
    try:
        with Cluster(tmp_path, 1, "--iterations", "1", *SMALL, program="rl") as cluster:
            cluster.start()
            cluster.wait_for(lambda e: e["event"] == "phase_started" and e["phase"] == 2)
            cluster.beating(0, lambda beat: beat.progress.get("done", 0) >= 2, deadline_s=400)
            tree = cluster.running(0, "VLLM::EngineCore", "fsbarrier.workers.rollout")
            cluster.kill(0)
            assert all_gone(tree), command_lines(tree)

            cluster.start()
            cluster.wait_for(lambda e: (e["event"], e["phase"]) == ("phase_started", 10), deadline_s=400)
            tree = cluster.running(0, "fsbarrier.workers.torchrun", "fsbarrier.workers.update")
            cluster.kill(0)
            assert all_gone(tree), command_lines(tree)

            assert leftovers(cluster.log_path) == {}
            assert rolled_out_twice(cluster.log_path, 1, "train") == []
            assert [process.poll() for process in foreign] == [None, None]
    finally:
        for process in foreign:
            process.kill()
            process.wait()
