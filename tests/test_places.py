"""The catalogue of places (tests/places): each launcher's environment, and machines and folders other than a developer's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import typed
from fuse import mounting
from places.launchers import LAUNCHED
from places.machines import PLACES

from fsbarrier.cli.start import ranks
from fsbarrier.doctor import machine
from fsbarrier.errors import UsageError
from fsbarrier.processes import limits

REPO = Path(__file__).resolve().parent.parent
DEMO_MODEL = REPO / "fsbarrier" / "data" / "demo" / "model"

FAST = ("coordination.beat_s=0.2", "coordination.last_call_s=0.5")


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_node_takes_its_rank_and_the_number_of_nodes_from_each_launcher(name: str) -> None:
    node = LAUNCHED[name]
    if node.expected is None:
        with pytest.raises(UsageError) as caught:
            rank = ranks.node_rank(master=False, worker=None, environ=node.environ)
            ranks.check_count(rank, node.environ, dry_run=False)
        assert node.says in str(caught.value)
        return
    rank = ranks.node_rank(master=False, worker=None, environ=node.environ)
    count = ranks.count_nodes(rank, node.environ)
    assert (rank and rank.value, count and count.value) == node.expected


# --- a mount that sets all modes itself ------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(mounting.missing()), reason=mounting.missing() or "")
def test_a_mount_with_forced_modes_is_told_from_a_folder_that_somebody_opened(tmp_path: Path) -> None:
    words = ("run", "--program", "toy", "--iterations", "1", *FAST, "--log-path")
    with mounting.mounted(tmp_path / "behind", tmp_path / "azure", ["--forced-mode", "0777"]) as mount:
        said = typed(*words, str(mount / "run"), code=2).err
        for part in (
            "has mode 0777",
            "chmod cannot change it",
            "dir_mode=0700,file_mode=0600",
            "--trust-mount",
        ):
            assert part in said
        assert "run chmod" not in said
        typed(*words, str(mount / "run"), "--trust-mount")
        # Each start says so itself, and whoever repairs the run does too.
        assert "--trust-mount" in typed(*words, str(mount / "run"), code=2).err
        recover = ("recover", "--iteration", "1", "--dry-run", "--log-path", str(mount / "run"))
        assert "--trust-mount" in typed(*recover, code=2).err
        typed(*recover, "--trust-mount")
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o777)
    for flag in ((), ("--trust-mount",)):
        assert f"run chmod o-w {opened}" in typed(*words, str(opened), *flag, code=2).err


# --- what a container or a job may use -------------------------------------------------------------------------------------------


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of one's own; the process is in /job/step."""
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "OWN", tmp_path / "own")
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    (tmp_path / "own").write_text("4:memory:/job/step\n3:cpu,pids:/job/step\n0::/job/step\n")
    for folder in ("job/step", "memory/job/step", "pids/job/step"):
        (tmp_path / "cgroup" / folder).mkdir(parents=True)
    return tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("files", "memory_mib", "processes"),
    [
        ({"job/memory.max": 5 << 20, "job/step/memory.max": "max"}, 5, None),
        (
            {"memory/job/step/memory.limit_in_bytes": 7 << 20, "memory/memory.limit_in_bytes": 2**63 - 4096},
            7,
            None,
        ),
        ({"pids/job/pids.max": 300, "pids/job/pids.current": 20, "job/step/memory.max": 6 << 20}, 6, 280),
        ({"pids.max": 2048, "pids.current": 3000, "memory.max": 9 << 20}, 9, 0),
    ],
)
def test_the_limit_of_the_job_counts_and_not_the_hosts(
    cgroups: Path, files: dict[str, int | str], memory_mib: int, processes: int | None
) -> None:
    for name, value in files.items():
        (cgroups / name).write_text(f"{value}\n")
    assert limits.memory_bytes()[0] == memory_mib << 20
    assert limits.processes_left()[0] == processes


@pytest.mark.parametrize(
    ("folder", "limit", "in_use", "prefix"),
    [
        ("job", "memory.max", "memory.current", ""),
        ("memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
    ids=["v2", "v1"],
)
def test_files_in_memory_may_use_half_of_what_a_jobs_limit_leaves(
    cgroups: Path, folder: str, limit: str, in_use: str, prefix: str
) -> None:
    """The cache of files counts as free. The limit is of a group around the process's own."""
    group = cgroups / folder
    (group / limit).write_text(str(50 << 20))
    (group / in_use).write_text(str(37 << 20))
    (group / "memory.stat").write_text(
        f"active_file 11\ninactive_file 13\n{prefix}active_file {2 << 20}\n{prefix}inactive_file {5 << 20}\n"
    )
    assert limits.free_bytes(limits.SHARED_MEMORY) == 10 << 20


def test_slurms_limit_of_memory_counts(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64")
    assert limits.memory_bytes() == (64 << 20, "SLURM_MEM_PER_NODE")
    plan = ("plan", "--model", DEMO_MODEL, "--nodes", "1", "--accelerators", "0")
    assert "of 64.0 MiB" in typed(*plan, code=2).out


def test_few_processes_are_told_at_the_start_and_by_the_doctor(
    cgroups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cgroups / "pids.max").write_text("300\n")
    (cgroups / "pids.current").write_text("40\n")
    said = typed("run", "--program", "toy", "--iterations", "1", *FAST, "--log-path", tmp_path / "run").err
    assert f"processes: 260 more by {cgroups}/pids.max; raise it" in said
    monkeypatch.setattr(machine, "IMPORTED", ("json", "no_such_package"))
    checked = typed("doctor", "--self", tmp_path, code=2).out.splitlines()
    assert any(line.startswith("warning  processes: 260 more") for line in checked)
    assert any(line.startswith("ok       import json") for line in checked)
    assert any("refused  import no_such_package: ModuleNotFoundError" in line for line in checked)
    listed = json.loads(typed("doctor", "--self", tmp_path, "--json", code=2).out)
    assert {"open files", "processes", "memory", "clock", "packages"} <= {each["name"] for each in listed}
    assert "name an existing directory, or give --self" in typed("doctor", code=2).err


# --- machines and accounts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if place.daily else pytest.mark.slow) for name, place in PLACES.items()],
)
def test_the_same_run_and_the_light_commands_work_in_each_place(name: str) -> None:
    place = PLACES[name]
    if reason := place.needs():
        pytest.skip(reason)
    # Not in the folder of pytest, which another user cannot enter.
    with tempfile.TemporaryDirectory(prefix="place-", dir="/tmp") as outside:
        here = Path(outside, place.folder)
        here.mkdir()
        for folder in (Path(outside), here):
            os.chown(folder, place.user or os.geteuid(), -1)
        environ = {
            **os.environ,
            "PYTHONPATH": str(REPO),
            "TMPDIR": str(here),
            "MY_PASSWORD": "hunter2",
            **place.environ,
        }
        environ = {key: value for key, value in environ.items() if value is not None}
        run = str(here / "run")
        # It may read all folders, because this Python may lie in one that only root can enter.
        caps = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
        as_user = [f"--reuid={place.user}", f"--regid={place.user}", "--clear-groups", *caps]
        as_user = ["setpriv", *as_user] if place.user else []
        for words in (
            ("run", "--program", "toy", "--iterations", "1", *FAST, "--log-path", run),
            ("status", "--log-path", run),
            ("report", "--log-path", run),
            ("run", "--dry-run", "--program", "ping", "--log-path", str(here / "other")),
        ):
            done = subprocess.run(
                [*place.within, *as_user, sys.executable, "-m", "fsbarrier", *words],
                env=environ,
                cwd=here,
                preexec_fn=place.before,
                capture_output=True,
                check=False,
            )
            assert done.returncode == 0, (words[0], done.stderr.decode(errors="replace")[-2000:])
            assert b"Traceback" not in done.stderr and b"hunter2" not in done.stdout + done.stderr
