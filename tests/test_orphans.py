"""What is left when a daemon and its guard are killed at once is ended by the next start, and nothing else is."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tree import ALL, Daemon, Fifo, Watched, kill_at_once

from fsbarrier.processes import orphans, processes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The records' folder of this test and of the daemons it starts, each of which ends orphans at its first start of a program."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # Where that place cannot be used, the home is.
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(orphans, "_swept", threading.Lock())
    return tmp_path / f"fsbarrier-{os.geteuid()}"


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Iterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def run(*commands: list[str]) -> Daemon:
        daemons.append(Daemon(tmp_path, *commands, SNAPSHOT_S="0"))
        return daemons[-1]

    yield run
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def bystander(fifo: Fifo, run: Callable[..., Daemon]) -> int:
    """Somebody's process."""
    run(fifo.command())
    return fifo.pids(1)[0]


def test_the_next_start_kills_what_a_guard_left_behind(
    tmp_path: Path, folder: Path, run: Callable[..., Daemon], fifo: Fifo, watched: Watched
) -> None:
    first = run(fifo.command(*ALL))
    pids = fifo.pids(len(ALL) + 1)
    watched.add(*pids)
    assert first.ask() == ["polled", "None"]  # which takes note of the tree
    kill_at_once(first.process.pid, first.guards[0])
    survivors = set(pids) - {first.mains[0]}  # the kernel ends the program itself
    assert set(watched.alive()) >= survivors
    second = run(fifo.command())
    fifo.pids(1)
    watched.wait_gone()
    _, _, told = (tmp_path / "0.log").read_text().partition("ended what a killed daemon had left: ")
    assert {int(pid) for pid in told.partition("\n")[0].split(", ")} >= survivors
    assert [path.name.split("-")[1] for path in folder.iterdir()] == [str(second.process.pid)]


def test_a_living_daemons_processes_stay(run: Callable[..., Daemon], fifo: Fifo) -> None:
    first = run(fifo.command("session"))
    pids = fifo.pids(2)
    assert first.ask() == ["polled", "None"]
    run(fifo.command())
    pids += fifo.pids(1)
    assert orphans.end_orphans() == {}
    fifo.assert_alive(pids)


@pytest.mark.parametrize("change", ["start", "boot", "pid_namespace", "daemon"])
def test_a_note_that_means_somebody_else_ends_nobody(
    change: str, folder: Path, bystander: int, fifo: Fifo
) -> None:
    note = dead_daemons_note(bystander)
    if change == "start":
        note["tree"] = [[bystander, processes.Stat(bystander).start - 1]]
    elif change == "daemon":
        note["daemon"] = [os.getpid(), processes.Stat(os.getpid()).start]
    else:
        note["here"][change] = "another"
    path = folder / "1-2-3.json"
    path.write_text(json.dumps(note))
    assert orphans.end_orphans() == {}
    fifo.assert_alive([bystander])
    assert path.exists() == (change in ("pid_namespace", "daemon"))


def dead_daemons_note(pid: int) -> dict[str, Any]:
    here = orphans._here()
    return {"here": here, "daemon": [os.getpid(), 1], "tree": [[pid, processes.Stat(pid).start]]}


def test_a_folder_that_others_may_write_is_not_ours(folder: Path, bystander: int, fifo: Fifo) -> None:
    (folder / "1-2-3.json").write_text(json.dumps(dead_daemons_note(bystander)))
    folder.chmod(0o770)
    assert orphans.end_orphans() == {}
    orphans.record_tree("9", {})
    assert not list(folder.glob("*-9.json"))
    fifo.assert_alive([bystander])


def test_a_link_in_the_folders_place_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    orphans.record_tree("9", {})
    assert list((tmp_path / "elsewhere").iterdir()) == []
