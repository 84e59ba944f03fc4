"""A whole run directory full of what should not be there, under every command: nothing hangs, nothing obeys, nothing costs much memory,
and what lies outside is neither read nor touched."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, REPO, Cluster
from fake_run import long_run
from test_hostile_files import KINDS, SECRET

from fsbarrier.errors import EXIT_INTERNAL

# Each test starts many commands, one after the other.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MOST_BYTES = 600 << 20
#: What a terminal would obey: a title, a colour, a link, a cleared screen, another direction of writing.
ORDERS = "\x1b]0;pwned\x07\x1b[31mred\x1b]8;;http://x\x1b\\link\x1b[2J\u202e"
COMMANDS = (
    "status --no-watch --log-path {run}",
    "status --no-watch --json --log-path {run}",
    "runs {parent}",
    "logs --log-path {run}",
    "logs --first-error --log-path {run}",
    "report --out {out}/report.html --csv {out}/csv --perfetto {out}/trace --prometheus {out}/prom --log-path {run}",
    "export {out}/model --log-path {run}",
    "export {out}/table.jsonl --log-path {run}",
    "recover --iteration 1 --log-path {run}",
    "aggregate --iteration 1 --log-path {run}",
    "stop --log-path {run}",
)


def hostile_lines(line: dict[str, object]) -> Iterator[bytes]:
    """What could stand in a journal, made from a line that does."""
    for changed in (
        {
            "phase_name": ORDERS,
            "event": "phase_started",
            "host": ORDERS,
            "error": ORDERS,
            "log": [ORDERS] * 50,
        },
        {"event": "node_lost", "lost": [{"node_rank": ORDERS, "host": {"a": 1}, "log": ORDERS}]},
        {"event": "generation_started", "members": list(range(10_000)), "number": 10**40, "reason": ORDERS},
        {
            "event": "phase_finished",
            "iteration": 10**30,
            "phase": -(10**30),
            "mono_s": 1e300,
            "seconds": 1e308,
        },
        {"event": "evaluated", "reward_mean": float("inf"), "iteration": 2**62, "time": "9999-99-99"},
        {"event": "updated", "loss": float("nan"), "node_rank": -5, "generation": "1", "time": 7},
        {"event": "work_failed", "error": None, "log": {"a": []}, "phase": True},
    ):
        yield json.dumps({**line, **changed}).encode()
    yield json.dumps(line).encode().replace(b'"iteration": 1', b'"iteration": ' + b"9" * 6000)
    yield b"[" * 200_000
    yield b'{"event": ' * 100_000
    yield b"\xff\xfe\x00\xed\xa0\x80" * 1000
    yield b'{"event": "' + b"x" * (20 << 20) + b'"}'
    yield b"\x00" * 1000


def plant(folder: Path, name: str, kind: str) -> None:
    """Something hostile under a name that is not taken."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outside").write_text(SECRET)
    KINDS[kind](folder / name)


def plant_beside_everything(paths: Any) -> None:
    """One of each kind under names that mean something in each folder of a run, beside what is really there."""
    for number, kind in enumerate(KINDS):
        rank, iteration = 40 + number, 70 + number
        plant(paths.joins, paths.join(rank, 1).name, kind)
        plant(paths.status, paths.beat(rank, 1).name, kind)
        plant(paths.events, paths.journal(rank, 1).name, kind)
        plant(paths.logs / f"attempt_{rank}" / "node_0", "daemon.log", kind)
        plant(paths.logs, f"attempt_{iteration}", kind)
        plant(paths.checkpoints, paths.checkpoint(iteration, 1).name, kind)
        plant(paths.batches, paths.batch(iteration, 1).name, kind)
        for split in ("train", "test"):
            plant(paths.trajectories(split), paths.merged(split, iteration).name, kind)
            plant(paths.trajectories(split), paths.part(split, 1, rank, 1, 1).name, kind)


@pytest.fixture
def canaries(tmp_path: Path) -> Iterator[None]:
    """What lies beside the run, which must be as it was."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    for name in ("canary", "folder/canary"):
        (outside / name).write_text(SECRET)

    def state() -> list[tuple[Path, tuple[int, ...]]]:
        # Of a file also the time of its last reading; that of a folder changes here.
        return sorted((path, path.lstat()[: 9 if path.is_file() else 7]) for path in outside.rglob("*"))

    before = state()
    yield
    assert state() == before


def measured(argv: list[str]) -> tuple[int, str, int]:
    """A command to its end: exit code, all that it said, and the most memory that it had."""
    reader, writer = os.pipe()
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, cwd=REPO)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode(errors="surrogateescape")
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, said, used.ru_maxrss * 1024


def fsbarrier(words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "fsbarrier", *words.split()]


def make(folder: Path) -> Any:
    """A run that was at work, with hostile things beside everything, hostile journals, and logs that give orders."""
    paths = long_run(folder, 2).paths
    for journal in sorted(paths.events.iterdir()):
        line = json.loads(journal.read_text().splitlines()[-1])
        with journal.open("ab") as stream:
            stream.write(b"".join(text + b"\n" for text in hostile_lines(line)))
    log = paths.node_logs(1, 0) / "rollout.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"Traceback {ORDERS}\nError: {ORDERS}\n")
    plant_beside_everything(paths)
    return paths


@pytest.mark.usefixtures("canaries")
def test_every_command_bears_a_run_that_is_hostile_everywhere(tmp_path: Path) -> None:
    paths, out = make(tmp_path / "runs" / "run"), tmp_path / "out"
    (paths.root / "quarantine").symlink_to(tmp_path / "outside" / "folder")
    out.mkdir()
    for command in COMMANDS:
        words = command.format(run=paths.root, parent=paths.root.parent, out=out)
        code, said, took = measured(fsbarrier(words))
        assert code not in (EXIT_INTERNAL, -signal.SIGKILL) and "Traceback (most" not in said, (command, said)
        assert SECRET not in said and not any(order in said for order in ("\x1b", "\x07", "\u202e")), command
        assert took < MOST_BYTES, (command, took)
    for file in out.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    assert b"\x1b" not in (out / "prom").read_bytes() + (out / "csv").read_bytes()


@contextmanager
def on_a_terminal(argv: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPO, env=env)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.usefixtures("canaries")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_shows_it_and_ends_by_a_signal(number: int, tmp_path: Path) -> None:
    paths, seen = make(tmp_path / "run"), b""
    with on_a_terminal(fsbarrier(f"top --log-path {paths.root}")) as (process, terminal):
        # It has drawn a picture once the names of the nodes' hosts are there.
        while b"gpu-c" not in seen:
            seen += os.read(terminal, 65536)
        process.send_signal(number)
        while True:
            try:
                if not (more := os.read(terminal, 65536)):
                    break
            except OSError:
                break
            seen += more
        assert process.wait() in (0, 130, 143, -signal.SIGTERM)
    text = seen.decode(errors="replace")
    assert SECRET not in text and "Traceback (most" not in text
    for order in ("\x1b]0;pwned", "\x1b]8;;", "\u202e", "\x1b[31mred"):
        assert order not in text


@pytest.mark.usefixtures("canaries")
def test_living_daemons_go_on_beside_all_that(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, *FAST, "--iterations", "3", "toy.tasks=8") as cluster:
        cluster.start()
        cluster.in_phase(0, 2)
        paths = cluster.paths
        plant_beside_everything(paths)
        for claims in paths.coordination.rglob("claims-*"):
            for number, kind in enumerate(KINDS):
                plant(claims, f"lot-0000-{900 + number:06d}", kind)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0) + cluster.said(1)
        assert SECRET not in cluster.said(0) + cluster.said(1)


@pytest.mark.usefixtures("canaries")
@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_that_cannot_read_its_generation_still_ends_by_a_signal(kind: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, 1, *FAST, "coordination.dead_s=50", "toy.tasks=8") as cluster:
        cluster.start()
        cluster.in_phase(0, 2)
        paths = cluster.paths
        plant(paths.generations, paths.generation(2).name, kind)
        cluster.beating(0, lambda beat: beat.counter > 3)
        cluster.signal(0, signal.SIGTERM)
        assert cluster.wait() == {0: 143}, cluster.said(0)
