"""The terminal: words for events, frames that fit, following to the end, a terminal left as it was."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from commands import typed
from fake_run import FakeRun, long_run
from rich.console import Console
from waiting import until

from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.succession import RENEWED
from fsbarrier.rundir.journal import parse
from fsbarrier.view import event_wording, quiet
from fsbarrier.view.live_view import follow, frame
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import status_of
from fsbarrier.view.summary import print_summary

REPO = Path(__file__).resolve().parent.parent
QUICK = {"coordination.beat_s": 0.05, "coordination.dead_s": 1.0}


def raw(event: str, phase: int = 2, **fields: Any) -> dict[str, Any]:
    place = {"generation": 3, "iteration": 1, "phase": phase, "phase_name": PHASE_NAMES[phase]}
    return {
        "time": datetime.now(UTC).isoformat(),
        "mono_s": 1.0,
        "node_rank": 1,
        **place,
        "event": event,
        **fields,
    }


def event_line(line: dict[str, Any]) -> str | None:
    event = parse(line)
    return event_wording.event_line(event) if event is not None else None


TOLD = [
    (raw("node_suspected", suspect=2, host="c", silent_s=6.2), "node 2 (c) has had no heartbeat for 6 s"),
    (raw("node_recovered", suspect=2, host="c"), "node 2 (c) has a heartbeat again"),
    (
        raw("generation_sealed", number=3, goes_on_at=[2, 7]),
        "generation 3 has ended; the run continues",
    ),
    (
        raw("node_lost", lost=[{"node_rank": 2, "host": "c", "why": "no heartbeat for 15.1 s"}]),
        "node 2 (c) is lost: no heartbeat for 15.1 s",
    ),
    (
        raw("generation_started", number=3, members=[0, 1], leader=0, reason="node 2 (c) is lost: x"),
        "generation 3: nodes 0, 1; leader 0",
    ),
    (
        raw("generation_started", number=3, members=[0, 1], leader=0, reason="joined: node 1 (b)"),
        "generation 3: nodes 0, 1; leader 0 (joined: node 1 (b))",
    ),
    (
        raw("generation_started", number=3, members=[0, 1], leader=0, reason=f"{RENEWED}100 iterations"),
        None,
    ),
    (
        raw("evaluated", 6, reward_mean=0.5812, policy_version=1),
        "iteration 1: held-out reward 0.58 (policy version 1)",
    ),
    (
        raw("rolled_out", 4, reward_mean=0.4, policy_version=0, trajectories=1536),
        "iteration 1: train reward 0.40, 1536 trajectories (policy version 0)",
    ),
    (
        raw("rolled_out", 4, reward_mean=0.4, groups_taken_over=3, groups_cut_off=1, left_out=0),
        "iteration 1: train reward 0.40, 3 groups taken over from slower nodes, 1 group cut off",
    ),
    (raw("shares_fixed", 1, why="x"), "nodes do not take over each other's tasks: x"),
    (
        raw("updated", 10, loss=0.01234, optimizer_steps=12, logprob_gap_mean=2e-5),
        "iteration 1: updated (12 optimizer steps, loss 0.012, log-prob gap 2e-05)",
    ),
    (
        raw("listens", 8, port=40123),
        "port 40123 is open to other hosts for the update: on all addresses until torchrun has started, then only on the address "
        "that all nodes can reach",
    ),
    (
        raw("code_changed", what=["program", "reward.kind"]),
        "changed since the last start of this node: program, reward.kind",
    ),
    (raw("weights_published", 11, policy_version=2), "iteration 1: published policy version 2"),
    (
        raw("work_failed", error="exit code 1\nmore", log=["x"]),
        "node 1, iteration 1, train_rollout failed: exit code 1",
    ),
    (raw("phase_started"), "iteration 1, phase 2 train_rollout begins"),
    (raw("phase_started", 3), None),
    (raw("phase_finished", seconds=83.2), "iteration 1, phase 2 train_rollout took 83 s"),
    (raw("phase_finished", seconds=0.01), None),
    (raw("work_finished", work_s=1.0), None),
    (raw("decision", value={"evaluate": True}), None),
    (raw("iteration_finished", 13), "iteration 1 is done"),
    (raw("node_joined", host="b", pid=7), "node 1 joined (b, process 7)"),
    (raw("left_generation", newest=4, reason="r"), "node 1 is not in generation 4 (r); it rejoins"),
    (
        raw("node_ended", state="finished", reason="2 iterations are done"),
        "the run ended: 2 iterations are done",
    ),
    (raw("node_ended", state="left", reason="stopped by SIGTERM"), "node 1 ended: stopped by SIGTERM"),
    (raw("something_new"), None),
    ({"event": "node_lost"}, None),
]


@pytest.mark.parametrize(
    ("line", "words"), TOLD, ids=[f"{line['event']}-{i}" for i, (line, _) in enumerate(TOLD)]
)
def test_events_in_plain_words(line: dict[str, Any], words: str | None) -> None:
    told = event_line(line)
    assert (told is None) == (words is None)
    if told is not None:
        assert re.fullmatch(r"\d\d:\d\d:\d\d  (.*)", told) and told[10:] == words


@pytest.mark.parametrize("event", sorted({line["event"] for line, _ in TOLD}))
@pytest.mark.parametrize(
    "junk", [None, "\x1b[31mred", [], {"a": [1]}, float("nan"), -1, True, 10**30, ["x", {"node_rank": "0"}]]
)
def test_events_with_unexpected_fields_never_raise(event: str, junk: object) -> None:
    names = (
        "suspect",
        "host",
        "silent_s",
        "lost",
        "number",
        "members",
        "leader",
        "reason",
        "reward_mean",
        "error",
        "log",
        "seconds",
    )
    told = event_line(raw(event, **dict.fromkeys(names, junk)))
    assert told is None or "\x1b" not in told


@pytest.mark.parametrize(
    ("line", "evidence"),
    [
        (
            raw(
                "node_lost",
                lost=[{"node_rank": 2, "why": "x", "beat_age_s": 15.12, "log": ["daemon.log: a", "b"]}],
            ),
            ["node 2: last heartbeat seen 15.1 s ago", "node 2: daemon.log: a", "node 2: b"],
        ),
        (raw("work_failed", error="exit code 1", log=["ValueError", "last"]), ["ValueError", "last"]),
        (raw("generation_started", number=3, reason="again: exit code 1"), ["exit code 1"]),
        (raw("generation_started", number=3, reason="joined: node 1"), []),
    ],
)
def test_a_log_has_the_evidence_below_a_bad_event(line: dict[str, Any], evidence: list[str]) -> None:
    event = parse(line)
    assert event is not None
    assert event_wording.log_lines(event)[1:] == [f"  | {one}" for one in evidence]


# --- the live view ----------------------------------------------------------------------------------------------------------


def busy_run(path: Path, nodes: int) -> FakeRun:
    """In the third iteration's rollout; node 1 waits, node 2 was silent, a program failed."""
    run = FakeRun(path, nodes=nodes, hosts=tuple(f"a-rather-long-host-name-{i}" for i in range(nodes)))
    run.start()
    run.iteration(1)
    run.iteration(2)
    run.iteration(3, range(2))
    for rank in range(nodes):
        run.line(rank, "phase_started", (3, 2, 0))
        run.beat(
            rank,
            4,
            "running",
            (3, 2),
            done=100 + rank,
            total=512,
            unit="x",
            reward_mean=0.41,
            tokens_per_s=3120.0,
            note="",
        )
    run.done(1, 3, 2)
    run.line(0, "node_suspected", (3, 2, 0), suspect=2, host="c", silent_s=6.0)
    run.fail(0, 3, 2, "it was a very long error " * 8, ["\x1b[31mValueError[/red] [bold]x", "y" * 300])
    return run


def picture(reader: RunReader, width: int, height: int) -> list[str]:
    console = Console(
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system=None,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(frame(status_of(reader, 100.0), reader, width, height))
    return captured.get().rstrip("\n").split("\n")


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RunReader]:
    """Readers of runs with so many nodes."""
    readers = {n: RunReader(busy_run(tmp_path_factory.mktemp("busy") / "run", n).log_path) for n in (3, 40)}
    for reader in readers.values():
        reader.poll(100.0)
    return readers


def test_a_frame_shows_what_people_look_for(busy: dict[int, RunReader]) -> None:
    text = "\n".join(picture(busy[3], 100, 40))
    for wanted in (
        *(
            "running",
            "generation 1, leader 0",
            "100/512",
            "reward 0.41",
            "tokens/s",
            "waiting for nodes 0, 2",
        ),
        *(
            "reward train",
            "reward held-out",
            "coordination 56 ms",
            "node 2 (c) has had no heartbeat for 6 s",
        ),
        *("! node 0, iteration 3, phase 2 train_rollout failed", "iteration 2: held-out reward"),
    ):
        assert wanted in text, wanted


@pytest.mark.parametrize(("width", "shown"), [(80, 4), (120, 6), (200, 6)])
def test_the_latest_figures_are_as_many_as_fit(busy: dict[int, RunReader], width: int, shown: int) -> None:
    (line,) = (one for one in picture(busy[3], width, 40) if one.startswith("about 5 min 41 s left · "))
    parts = ["11k tokens/s", "loss 0.015", "entropy 0.75", "310 tokens an answer", "1.25 segments an episode"]
    assert line.rstrip().split(" · ")[1:] == parts[: shown - 1]


# --- following ---------------------------------------------------------------------------------------------------------------


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=80, highlight=False), out


def test_without_a_terminal_it_ends_with_the_run_and_its_summary(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 2, extra=QUICK)
    said = typed("top", "--log-path", run.log_path)
    assert f"fsbarrier report --log-path {run.log_path}" in " ".join(said.out.split())


def test_plain_output_says_what_is_waited_for_while_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "FIRST_S", 0.0)
    run, (console, out), stop = busy_run(tmp_path / "run", 2), plain(), threading.Event()
    watching = threading.Thread(target=follow, args=(run.log_path,), kwargs={"output": console, "stop": stop})
    watching.start()
    try:
        wanted = re.compile(
            r"^\d\d:\d\d:\d\d  iteration \d, phase 2 train_rollout: node 0: \d+ of \d+, reward", re.MULTILINE
        )
        until(lambda: wanted.search(out.getvalue()), out.getvalue)
    finally:
        stop.set()
        watching.join()


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    run = busy_run(tmp_path / "run", 3)
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (30, 80))
    before = termios.tcgetattr(slave)
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    environ |= {"TERM": "xterm-256color", "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-m", "fsbarrier", "top", "--log-path", str(run.log_path)]
    process = subprocess.Popen(
        argv, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
    )
    try:
        output = read_until(master, b"train_rollout")
        process.send_signal(signal.SIGINT)
        output += read_until(master, b"\x1b[?1049l")
        assert process.wait(60) == 0
        assert termios.tcgetattr(slave) == before
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
    assert output.count(b"\x1b[?1049h") == 1 and output.count(b"\x1b[?1049l") == 1
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l")
    assert b"Traceback" not in output


def read_until(fd: int, wanted: bytes) -> bytes:
    """What the terminal was sent, up to and with `wanted` and what came along with it."""
    data, end = b"", time.monotonic() + 60
    while wanted not in data:
        assert time.monotonic() < end, data
        if select.select([fd], [], [], 1.0)[0]:
            data += os.read(fd, 65536)
    return data


# --- the summary --------------------------------------------------------------------------------------------------------------


def summary_of(run: FakeRun) -> str:
    console, out = plain()
    print_summary(run.log_path, console)
    return out.getvalue()


def test_the_summary_has_rewards_times_events_and_files(tmp_path: Path) -> None:
    text = summary_of(long_run(tmp_path / "run"))
    for wanted in (
        *(
            "■ finished",
            "iteration 6 of 6",
            "mean of 6",
            "0.23",
            "0.74",
            "train_rollout 54 %",
            "coordination 57 ms (0.06 %)",
        ),
        *(
            "node 2 (gpu-c) is lost: no heartbeat for 15.4 s",
            "generation 3: nodes 0, 1, 2; leader 0 (joined: node 2 (gpu-c))",
        ),
        f"fsbarrier report --log-path {tmp_path / 'run'}",
    ):
        assert wanted in text, wanted


def test_the_curve_of_rewards_shows_the_newest(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 70, lose_at=None)
    said = typed("status", "--no-watch", "--log-path", run.log_path)
    (curve,) = (line for line in said.out.splitlines() if line.startswith("reward train"))
    assert "█" in curve and "▁" not in curve, "they rise"


def test_the_summary_of_a_failed_run_begins_with_why(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", extra=QUICK)
    run.start()
    run.fail(1, 1, 2, "exit code 1", ["ValueError: no answer"])
    run.verdict(
        4, "node 1 (gpu-b), iteration 1, phase 2 train_rollout: exit code 1\n  | ValueError: no answer"
    )
    for rank in range(3):
        run.beat(rank, 9, "broken", (1, 2))
    lines = [line for line in summary_of(run).splitlines() if line]
    assert "■ broken, exit code 4" in lines[0]
    assert lines[2].startswith("! node 1 (gpu-b), iteration 1") and lines[3] == "  | ValueError: no answer"
    assert "node 1 logs" in "\n".join(lines)
