"""No key or password is where others may read it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import FAST, Cluster
from commands import typed
from fake_run import FakeRun
from other_user import attacked, needs_root, opened_by

from fsbarrier.cli.start.node_checks import private_network_problem
from fsbarrier.engine.engine import Engine
from fsbarrier.pool.directory import Pool
from fsbarrier.processes.supervisor import Child, StartFailed
from fsbarrier.run.worker_program import _environment
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.journal import Journal
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.secrecy import shown, without_secrets

CANARY = "hunter2canary"


def test_variables_with_secrets_are_left_out() -> None:
    secret = (
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "WANDB_APIKEY",
        "GOOGLE_CREDENTIALS",
    )
    plain = ("PATH", "TOKENIZERS_PARALLELISM", "HOME", "KEYBOARD", "MONKEYS", "CUDA_VISIBLE_DEVICES")
    environ = dict.fromkeys((*secret, *plain, "MINE"), "x") | {"HTTPS_PROXY": f"http://me:{CANARY}@proxy"}
    assert without_secrets(environ, ("MINE", None)) == dict.fromkeys(plain, "x")


def test_the_engine_and_programs_without_code_of_the_users_get_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "JUDGE"):
        monkeypatch.setenv(name, CANARY)
    settings = resolve([], {"judge.api_key_env": "JUDGE"}, cross_checks=False)
    engine = Engine(settings.engine, log_file=tmp_path / "log", work_dir=tmp_path, secrets_named=("JUDGE",))
    assert CANARY not in engine._environ.values()
    argv = ("python", "-m", "fsbarrier.workers.torchrun", "-m", "fsbarrier.workers.update")
    env = _environment(argv, settings, Path("/private"))
    assert CANARY not in env.values() and env["TMPDIR"] == "/private"
    for argv in (("python", "-m", "fsbarrier.workers.rollout"), ("mine.py",)):
        env = _environment(argv, settings, Path("/private"))
        assert env["JUDGE"] == CANARY and env.get("TMPDIR") == os.environ.get("TMPDIR")


def test_only_their_own_program_gets_the_keys_of_a_runs_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    for trackers, kept in (
        ("", {"WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN"}),
        ("wandb,tensorboard", {"MLFLOW_TRACKING_TOKEN", "HF_TOKEN"}),
    ):
        settings = resolve([], {"tracker.names": trackers}, cross_checks=False)
        for argv in (("python", "-m", "fsbarrier.workers.rollout"), ("mine.py",)):
            found = _environment(argv, settings, Path("/private"))
            assert {name for name, value in found.items() if value == CANARY} == kept


def test_settings_that_are_shown_have_no_secrets(tmp_path: Path) -> None:
    settings = resolve(
        [],
        {
            "program": "ping",
            "judge.url": f"https://me:{CANARY}@judge/v1",
            "trainer.command": f"train --at http://me:{CANARY}@host",
            "custom": {"secret.key": CANARY, "secret_two": CANARY, "plain": "plain"},
        },
        cross_checks=False,
    )
    seen = shown(settings.as_json())
    assert CANARY not in json.dumps(seen) and "plain" in json.dumps(seen)
    assert set(seen) == set(settings.as_json())


def test_no_secret_is_in_the_report_or_the_dry_run(tmp_path: Path) -> None:
    chosen = ("--program", "ping", f"custom.secret.key={CANARY}", f"judge.url=https://me:{CANARY}@judge/v1")
    for more in ((), ("--json",)):
        log_path = str(tmp_path / "dry")
        said = typed(
            "run", "--master", "--num-nodes", "1", "--log-path", log_path, "--dry-run", *more, *chosen
        )
        assert CANARY not in (said := said.out) and "custom" in said
    secrets = {"custom": {"secret.key": CANARY}, "judge.url": f"http://me:{CANARY}@j"}
    run = FakeRun(tmp_path / "run", extra=secrets)
    run.start()
    typed("report", "--log-path", run.log_path, "--out", tmp_path / "report.html")
    assert CANARY not in (tmp_path / "report.html").read_text()


def test_what_is_handed_on_to_nodes_stands_in_no_list_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that goes on with a run hands node 0 the settings that may change, also those of a settings file."""
    config, began = tmp_path / "config.toml", list[list[str]]()
    config.write_text(f'judge.url = "https://me:{CANARY}@judge/v1"\neval.samples = 7\n')
    settings = resolve([], {"program": "ping"}, cross_checks=False)
    log_path = str(
        runrecord.publish(runrecord.new(tmp_path / "run", settings, tasks={}, model=None)).log_path
    )

    def start(argv: list[str], **_: object) -> Child:
        began.append(argv)
        assert "eval.samples=7" in argv
        given = Path(argv[argv.index("--config") + 1])
        assert tomllib.loads(given.read_text()) == {"judge": {"url": f"https://me:{CANARY}@judge/v1"}}
        assert given.stat().st_mode & 0o777 == 0o600
        raise StartFailed("enough", 126)

    monkeypatch.setattr(Child, "start", start)
    words = ["--log-path", log_path, "--config", str(config)]
    typed("launch", "local", *words, code=4)
    assert began and CANARY not in " ".join(began[0])
    pool = Pool(tmp_path / "pool")
    pool.make(shared_group=False)
    secret = f"custom.secret.key={CANARY}"
    said = typed("submit", pool.root, "--nodes", "1", "--program", "ping", secret, code=2)
    assert (
        "custom.secret.key=*** would be visible to other users" in said.err
        and CANARY not in said.out + said.err
    )
    assert not pool.read().jobs


def test_no_password_is_in_a_journal_or_in_a_log(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", run_id="r", node_rank=0, incarnation=1)
    place = {"incarnation": 1, "generation": 1, "iteration": 1, "phase": 1, "phase_name": "x"}
    journal.write("work_failed", 1.0, place, {"error": f"no answer from https://me:{CANARY}@host/v1"})
    journal.close()
    line = json.loads((tmp_path / "journal").read_text())
    assert line["error"] == "no answer from https://me:***@host/v1"
    with Child.start(["true", f"http://me:{CANARY}@host"], log_file=tmp_path / "log", name="x") as child:
        child.wait(60)
    assert CANARY not in (tmp_path / "log").read_text()


# --- another user ---------------------------------------------------------------------------------------------------------------

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
        daemon, answers, networks = cluster.processes[0], dict[str, list[str]](), set[str]()
        while daemon.poll() is None:
            # It may end meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                got, said = attack(cluster, place, 0)
                assert got == []
                for address, texts in said.items():
                    answers.setdefault(address, []).extend(texts)
                networks |= {
                    os.readlink(f"/proc/{pid}/ns/net")
                    for pid in cluster.tree(0)
                    if b"fsbarrier.workers.update" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                }
        assert cluster.wait(deadline_s=900) == {0: 0}, cluster.said(0)
    updated = [event for event in cluster.events() if event["event"] == "updated"]
    assert [event["went_on"] for event in updated] == [False, True]
    # The network of this host shows what was attacked; the trainer was in another one.
    assert networks - {os.readlink("/proc/self/ns/net")} or private_network_problem()
    assert {address.split()[0] for address in answers} == {"127.0.0.1"}
    refused = [texts for texts in answers.values() if any("use the client" in text for text in texts)]
    assert refused, "the address of the agents was never met"
    for text in (text for texts in answers.values() for text in texts):
        assert "=" not in text.partition("\r\n\r\n")[2] and "200 OK" not in text, text
    assert [path.name for path in (place / "tmp").iterdir()] == [f"fsbarrier-{os.geteuid()}"]
    assert files_with_keys(place) == set()
