"""Real daemons under random strikes (scripts/lab/chaos.py, soak.py), and that their judge (outside_checker.py) sees what is wrong."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import outside_checker
import pytest
from cluster import FAST, REPO, Cluster

TASKS = 24


def chaos(folder: Path, *arguments: str) -> Path:
    """Strike; the run that is left. The script itself lets the judge read it."""
    argv = [sys.executable, str(REPO / "scripts" / "lab" / "chaos.py"), "--path", str(folder), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    [run] = folder.glob("chaos-*/run")
    return run


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four nodes that were struck for six seconds."""
    folder = tmp_path_factory.mktemp("chaos")
    arguments = (
        "--nodes",
        "4",
        "--minutes",
        "0.1",
        "--seed",
        "5",
        "--tasks",
        str(TASKS),
        "--phase-s",
        "0.1",
    )
    return chaos(folder, *arguments)


def test_daemons_survive_random_strikes(struck: Path) -> None:
    assert len(list((struck / "coordination" / "generations").iterdir())) > 2
    assert list((struck / "train_trajectories").glob("*.iteration1"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("program", "minutes"), [("toy", "3"), ("ping", "1")])
def test_sixty_four_daemons_survive_minutes_of_it(tmp_path: Path, program: str, minutes: str) -> None:
    chaos(tmp_path, "--nodes", "64", "--minutes", minutes, "--program", program, "--tasks", "128")


def test_a_start_after_one_that_was_killed_before_it_joined(tmp_path: Path) -> None:
    with Cluster(tmp_path, 1, *FAST, "--iterations", "1", program="ping") as cluster:
        left = cluster.paths.node_logs(1, 0) / "daemon.log"
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_text("what it said\n")
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert left.read_text().startswith("what it said\n")


@pytest.mark.slow
def test_the_goodput_of_a_run_whose_nodes_are_killed(tmp_path: Path) -> None:
    script = [sys.executable, str(REPO / "scripts" / "lab" / "goodput.py"), "--path", str(tmp_path)]
    words = ("--program", "toy", "--iterations", "7", "--every", "3", *FAST, "toy.phase_s=0.5")
    done = subprocess.run([*script, *words], capture_output=True, text=True)
    assert not done.stderr and "goodput 0." in done.stdout, done
    lost = re.findall(
        r"^killed in iteration \d+: node \d( \(leader\))?; (\d+) finished groups", done.stdout, re.M
    )
    assert lost == [(" (leader)", "0"), ("", "0")], done.stdout
    assert "goal 0.90" in done.stdout


# --- the judge ----------------------------------------------------------------------------------------------------------------


def journal(run: Path) -> Path:
    """The journal of some node that finished an iteration."""
    return next(p for p in sorted((run / "events").iterdir()) if "iteration_finished" in p.read_text())


def edit_lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def drop_a_phase(run: Path) -> None:
    """One between two others of the same generation."""

    def place(line: str) -> tuple[int, int, int]:
        record = json.loads(line)
        return record["generation"], record["iteration"], record["phase"]

    def without(lines: list[str]) -> list[str]:
        begun = [place(line) for line in lines if '"phase_started"' in line]
        dropped = next(m for a, m, b in zip(begun, begun[1:], begun[2:], strict=False) if a[0] == b[0])
        return [line for line in lines if place(line) != dropped]

    edit_lines(journal(run), without)


def leave_too_early(run: Path) -> None:
    def early(line: str) -> str:
        return re.sub(r'"mono_s":[0-9.]+', '"mono_s":0.5', line) if '"phase_finished"' in line else line

    edit_lines(journal(run), lambda lines: [early(line) for line in lines])


def rewrite_generation(run: Path, change: Callable[[dict[str, object]], None], number: int = 2) -> None:
    path = run / "coordination" / "generations" / f"gen-{number:06d}.json"
    record = json.loads(path.read_bytes().partition(b"\n")[2])
    change(record)
    body = json.dumps(record).encode() + b"\n"
    header = f"fsbarrier/2 generation {len(body)} {hashlib.sha256(body).hexdigest()[:32]}\n"
    path.write_bytes(header.encode() + body)


def another_leader(run: Path) -> None:
    rewrite_generation(run, lambda record: record.update(leader=max(m["rank"] for m in record["members"])))  # type: ignore[attr-defined]


def a_torn_record(run: Path) -> None:
    path = run / "coordination" / "generations" / "gen-000001.json"
    path.write_bytes(path.read_bytes()[:-3])


def merged(run: Path) -> Path:
    return run / "train_trajectories" / "train_trajectories.pt.iteration1"


def task_twice(run: Path) -> None:
    import torch

    held = torch.load(merged(run), weights_only=True)
    first, *others = held["trajectories"]
    first["task_index"] = next(
        one["task_index"] for one in others if one["task_index"] != first["task_index"]
    )
    torch.save(held, merged(run))


def flip_a_byte(run: Path) -> None:
    data = bytearray(merged(run).read_bytes())
    data[len(data) // 2] ^= 1
    merged(run).write_bytes(data)


def lose_a_file(run: Path) -> None:
    merged(run).unlink()


def spoil_the_policy(run: Path) -> None:
    some = next(path for path in (run / "model.pt").resolve().rglob("*") if path.is_file())
    some.write_bytes(some.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (drop_a_phase, "follows|went through|finished with the phases"),
        (leave_too_early, "before .* entered it"),
        (another_leader, "under|does not lead"),
        (a_torn_record, "not the header"),
        (task_twice, "twice|lost"),
        (flip_a_byte, "damaged|cannot be read"),
        (lose_a_file, "cannot be read"),
        (spoil_the_policy, "manifest"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_judge_sees_each_harm(
    struck: Path, tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(struck, run, symlinks=True)
    assert outside_checker.judge(run, TASKS) == []
    harm(run)
    wrong = outside_checker.judge(run, TASKS)
    assert any(re.search(words, line) for line in wrong), wrong


# --- soak -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_hundred_iterations_of_three_struck_nodes() -> None:
    argv = [
        sys.executable,
        str(REPO / "scripts" / "lab" / "soak.py"),
        "--nodes",
        "3",
        "--iterations",
        "200",
        "--seed",
        "3",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
