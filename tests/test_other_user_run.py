"""What another user of the machine can learn of a run at work, and what is left of its keys when it is over."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import FAST, Cluster
from commands import typed
from other_user import attacked, needs_root, opened_by

KEYS = {name: f"canary-{name.lower()}-7f3a9c1e5b2d" for name in ("HF_TOKEN", "WANDB_API_KEY", "JUDGE_KEY")}
SETTING, PASSWORD = "canary-setting-7f3a9c1e5b2d", "canary-password-7f3a9c1e5b2d"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody can enter, as a home directory on a cluster often is."""
    folder = Path(tempfile.mkdtemp(prefix="fsbarrier-test-"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def attack(cluster: Cluster, place: Path, *ranks: int) -> tuple[list[str], dict[str, list[str]]]:
    """As another user, all that these nodes' processes have open now, and all that lies in the run and in the temporary folder."""
    pids = [pid for rank in ranks for pid in cluster.tree(rank)]
    folders = [cluster.log_path, place / "tmp"]
    return attacked(pids, opened_by(pids), folders=folders, secrets=["7f3a9c1e5b2d"])


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
    with Cluster(
        place, 2, *FAST, "--iterations", "2", "toy.tasks=8", "--config", str(config), real=True
    ) as cluster:
        for rank in range(2):
            cluster.env[rank] = {**KEYS, "TMPDIR": str(place / "tmp")}
        cluster.output.chmod(0o700)
        shown = cluster.output
        cluster.start()
        for phase in (2, 10):
            cluster.in_phase(0, phase)
            # Nothing of it listens at an address.
            assert attack(cluster, place, 0, 1) == ([], {})
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        assert attack(cluster, place) == ([], {})
    assert [path.name for path in (place / "tmp").iterdir()] == [f"fsbarrier-{os.geteuid()}"]
    log_path = str(cluster.log_path)
    typed("report", "--log-path", log_path, "--csv", shown / "csv", "--out", shown / "page")
    typed("run", "--master", "--dry-run", "--log-path", log_path)
    typed("status", "--no-watch", "--json", "--log-path", log_path)
    said = capfd.readouterr()
    assert "7f3a9c1e5b2d" not in said.out + said.err
    # Settings are in the run's own record, which only its owner can read.
    config.unlink()
    assert files_with_keys(place) == {"run.json"}
    for path in cluster.log_path.rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert os.stat(cluster.log_path).st_mode & 0o077 == 0


ASKS_BY_ITS_ADDRESS = """
import httpx

class Asks:
    async def run(self, task, client):
        key = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(trust_env=False, timeout=None) as theirs:
            asked = {"model": client.model, "prompt": task.prompt}
            (await theirs.post(f"{client.base_url}/completions", json=asked, headers=key)).raise_for_status()
        return client.trajectory()
"""
SMALL = ("rollout.tasks=24", "rollout.samples=4", "eval.tasks=8", "optimizer.warmup_steps=0")


@needs_root
@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_another_user_gets_nothing_from_engines_agents_and_a_trainer_that_stays(place: Path) -> None:
    """The whole time of a real run: what listens does so on loopback, tells strangers nothing, and goes on whatever they send."""
    (place / "agent.py").write_text(ASKS_BY_ITS_ADDRESS)
    own = (f"rollout.agent={place}/agent.py:Asks", "trainer.processes_per_node=2", "trainer.keep=process")
    with Cluster(place, 1, "--iterations", "2", *SMALL, *own, program="rl") as cluster:
        cluster.output.chmod(0o700)
        cluster.env[0] = {**KEYS, "TMPDIR": str(place / "tmp")}
        cluster.start()
        daemon, answers = cluster.processes[0], dict[str, list[str]]()
        while daemon.poll() is None:
            # It may end meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                got, said = attack(cluster, place, 0)
                assert got == []
                for address, texts in said.items():
                    answers.setdefault(address, []).extend(texts)
        assert cluster.wait(deadline_s=900) == {0: 0}, cluster.said(0)
    updated = [event for event in cluster.events() if event["event"] == "updated"]
    assert [event["went_on"] for event in updated] == [False, True]
    assert {address.split()[0] for address in answers} == {"127.0.0.1"}
    refused = [texts for texts in answers.values() if any("use the client" in text for text in texts)]
    assert refused, "the address of the agents was never met"
    for text in (text for texts in answers.values() for text in texts):
        assert "=" not in text.partition("\r\n\r\n")[2] and "200 OK" not in text, text
    assert [path.name for path in (place / "tmp").iterdir()] == [f"fsbarrier-{os.geteuid()}"]
    assert files_with_keys(place) == set()
