"""`notify.command`: a user's command hears what happens to a run, from one node. Real daemons; the choice of the node alone, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cluster import FAST, Cluster
from commands import typed

from fsbarrier.protocol.facts import Generation, Member, Position
from fsbarrier.protocol.state import Node
from fsbarrier.run.notifier import Notifier

ABOUT = {"run_id": "r", "log_path": "/r"}


def listener(folder: Path) -> str:
    """A command that adds what it hears to `heard`."""
    script = folder / "my listener.py"
    script.write_text(
        "import json, os, sys\n"
        "event = json.load(sys.stdin)\n"
        "assert event == json.loads(os.environ['FSBARRIER_EVENT'])\n"
        "open(sys.argv[1], 'a').write(json.dumps(event) + '\\n')\n"
    )
    return f"'{sys.executable}' '{script}' '{folder}/heard'"


def heard(folder: Path) -> list[dict[str, object]]:
    path = folder / "heard"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_tells_how_it_goes_once(tmp_path: Path) -> None:
    small = (*FAST, "toy.tasks=4", "toy.phase_s=0", "--iterations", "2")
    with Cluster(tmp_path, 2, *small, f"notify.command={listener(tmp_path)}") as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said_by_all()
    events = heard(tmp_path)
    assert [event["event"] for event in events] == ["started", "evaluated", "evaluated", "finished"]
    assert {event["node_rank"] for event in events} == {0}
    assert {event["log_path"] for event in events} == {str(tmp_path / "run")}
    assert [event["iteration"] for event in events[1:3]] == [1, 2] and isinstance(
        events[1]["reward_mean"], float
    )


def node(rank: int) -> Node:
    members = tuple(Member(rank, 1) for rank in range(3))
    return Node(
        rank,
        1,
        0.0,
        "host",
        generation=Generation(number=1, members=members, leader=0, start=Position(1, 0), reason=""),
    )


def test_the_command_is_told_no_password(tmp_path: Path) -> None:
    notifier = Notifier(listener(tmp_path), tmp_path / "notify.log", ABOUT)
    notifier.tell(
        "node_ended", node(0), {"state": "broken", "reason": "no answer from https://me:hunter2@host/v1"}
    )
    notifier.close()
    (event,) = heard(tmp_path)
    assert event["reason"] == "no answer from https://me:***@host/v1"


def test_a_command_that_fails_or_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsbarrier.run.notifier.COMMAND_S", 0.2)
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    for command in ("false", f"cat '{fifo}'", "/nowhere/program"):
        notifier = Notifier(command, tmp_path / "notify.log", ABOUT)
        told = threading.Thread(target=notifier.tell, args=("evaluated", node(0), {}))
        told.start()
        told.join(60)
        assert not told.is_alive()
        notifier.close()
    assert (
        str(fifo)
        not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    )


def test_a_command_that_cannot_be_is_refused(tmp_path: Path) -> None:
    words = ["run", "--program", "ping", "--log-path", str(tmp_path / "run")]
    for command, says in (("/nowhere/program x", "not found on this node"), ("'x", "No closing quotation")):
        said = typed(*words, f"notify.command={command}", code=2)
        assert f"notify.command={command}: " in said.err and says in said.err
