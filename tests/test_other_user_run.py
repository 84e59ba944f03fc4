"""What another user of the machine can learn of a run at work, and what is left of its keys when it is over."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import FAST, Cluster
from other_user import needs_root, start_as_other

from fsbarrier import cli

KEYS = {name: f"canary-{name.lower()}-7f3a9c1e5b2d" for name in ("HF_TOKEN", "WANDB_API_KEY", "JUDGE_KEY")}
SETTING, PASSWORD = "canary-setting-7f3a9c1e5b2d", "canary-password-7f3a9c1e5b2d"

#: As another user: all that can be read of processes, temporary files and the run, and what can be entered or connected to.
SCAN = """
import json, os, socket, stat, sys
found, seen = [], 0
for pid in {*filter(str.isdecimal, os.listdir("/proc"))} - {str(os.getpid())}:
    for name in ("environ", "cmdline"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as stream:
                data = stream.read(1 << 20)
        except OSError:
            continue
        seen += 1
        found += [f"{name} of {pid}"] if b"7f3a9c1e5b2d" in data else []
for top in sys.argv[1:]:
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
                if stat.S_ISSOCK(mode):
                    with socket.socket(socket.AF_UNIX) as one:
                        one.connect(path)
                elif stat.S_ISREG(mode):
                    open(path, "rb").close()
                else:
                    continue
            except OSError:
                continue
            found.append(path)
print(json.dumps([seen, found]))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody can enter, as a home directory on a cluster often is."""
    folder = Path(tempfile.mkdtemp(prefix="fsbarrier-test-"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def seen_by_another(*folders: Path) -> list[str]:
    other = start_as_other(SCAN, *folders)
    said, failed = other.communicate()
    assert other.returncode == 0, failed
    processes, found = json.loads(said)
    assert processes > 0
    return [str(one) for one in found]


def files_with_keys(folder: Path) -> set[str]:
    found = set()
    for path in folder.rglob("*"):
        if stat.S_ISREG(path.lstat().st_mode) and b"7f3a9c1e5b2d" in path.read_bytes():
            found.add(path.name)
    return found


@needs_root
def test_another_user_learns_nothing_and_no_key_is_left(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = place / "config.toml"
    config.touch(mode=0o600)
    config.write_text(
        f'judge.url = "https://me:{PASSWORD}@judge/v1"\njudge.api_key_env = "JUDGE_KEY"\n'
        f'[custom]\n"secret.key" = "{SETTING}"\n'
    )
    with Cluster(place, 2, *FAST, "--iterations", "2", "toy.tasks=8", "--config", str(config)) as cluster:
        for rank in range(2):
            cluster.env[rank] = {**KEYS, "TMPDIR": str(place / "tmp")}
        shown = place / "output"
        cluster.start()
        for phase in (2, 10):
            cluster.in_phase(0, phase)
            assert seen_by_another(cluster.log_path, place / "tmp", config.parent / "run") == []
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
    log_path = str(cluster.log_path)
    assert (
        cli.main(
            ["report", "--log-path", log_path, "--csv", str(shown / "csv"), "--out", str(shown / "page")]
        )
        == 0
    )
    assert cli.main(["run", "--master", "--dry-run", "--log-path", log_path]) == 0
    assert cli.main(["status", "--no-watch", "--json", "--log-path", log_path]) == 0
    said = capfd.readouterr()
    assert "7f3a9c1e5b2d" not in said.out + said.err
    # Settings are in the run's own record, which only its owner can read.
    config.unlink()
    assert files_with_keys(place) == {"run.json"}
    for path in cluster.log_path.rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert os.stat(cluster.log_path).st_mode & 0o077 == 0
