"""The built-in task comes into a run from the cache, in one step, also for several starts at once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from fsbarrier.cli.start import demo_folder
from fsbarrier.data import demo_tasks
from fsbarrier.errors import ProgramFailed
from fsbarrier.store.private_folder import private_folder


def fill(folder: Path) -> None:
    """A demo folder as `fsbarrier.workers.demo_model` makes it, without the minute that its model takes."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "train.jsonl").write_text("{}\n")
    (folder / "READY").write_text(json.dumps({"recipe": demo_tasks.RECIPE}))


def test_copied_from_the_cache(tmp_path: Path) -> None:
    fill(demo_tasks.folder(tmp_path / "cache"))
    target = tmp_path / "run" / "demo"
    said: list[str] = []
    demo_folder.make(target, tmp_path / "cache", said.append)
    assert said == []
    assert demo_tasks.is_ready(target)
    assert (target / "model" / "config.json").read_text() == "{}"
    assert target.stat().st_mode & 0o777 == 0o700
    assert (target / "train.jsonl").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in target.parent.iterdir()] == ["demo"]
    demo_folder.make(target, tmp_path / "no cache", said.append)  # there already


def test_made_once_where_no_cache_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    temporary: list[Path] = []

    def run(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        temporary.append(Path(env["TMPDIR"]))
        assert temporary[0].is_relative_to(private_folder().path) and temporary[0].is_dir()
        fill(Path(command[-1]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    said: list[str] = []
    for name in ("a", "b"):
        demo_folder.make(tmp_path / name / "demo", tmp_path / "cache", said.append)
        assert demo_tasks.is_ready(tmp_path / name / "demo")
    assert len(commands) == len(said) == 1
    assert commands[0][-4:-1] == ["-m", "fsbarrier.workers.demo_model", "--out"]
    assert not temporary[0].exists()


@pytest.mark.parametrize(
    ("code", "raised"), [(1, ProgramFailed), (-9, ProgramFailed), (-2, KeyboardInterrupt), (0, ProgramFailed)]
)
def test_what_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, raised: type[BaseException]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, env: subprocess.CompletedProcess(command, code))
    with pytest.raises(raised):
        demo_folder.make(tmp_path / "run" / "demo", tmp_path / "cache", lambda line: None)
    assert not (tmp_path / "run").exists()
