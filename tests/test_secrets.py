"""Keys and passwords go where they are used, and are shown nowhere."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from commands import typed
from fake_run import FakeRun

from fsbarrier.cli.pool.directory import Pool
from fsbarrier.engine.engine import Engine
from fsbarrier.processes.secret_variables import without_secrets
from fsbarrier.processes.supervisor import Child, StartFailed
from fsbarrier.run.worker_program import _environment
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.journal import Journal
from fsbarrier.settings.hidden import shown
from fsbarrier.settings.resolve import resolve

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
