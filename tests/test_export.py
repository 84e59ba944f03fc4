"""`fsbarrier export`: the policy that is asked for, checked, in one step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsbarrier.cli import main
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import Settings


def checkpoint(log_path: Path, version: int, generation: int, text: str, *, complete: bool = True) -> Path:
    folder = RunPaths(log_path).checkpoint(version, generation)
    (folder / "model").mkdir(parents=True)
    (folder / "trainer").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_text(text)
    (folder / "trainer" / "state.pt").write_text("state")
    if complete:
        checkpoints.write_manifest(folder, version)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a first policy and versions 1 and 2, of which 2 was tried twice and 1 is what is served."""
    log_path, first = tmp_path / "run", tmp_path / "first"
    first.mkdir()
    (first / "model.safetensors").write_text("zero")
    runrecord.publish(runrecord.new(log_path, Settings(), tasks={}, model=str(first)))
    one = checkpoint(log_path, 1, 1, "one")
    checkpoint(log_path, 2, 1, "two, first try")
    checkpoint(log_path, 2, 2, "two")
    checkpoint(log_path, 2, 3, "two, half", complete=False)
    checkpoints.publish_link(log_path, one)
    return log_path


def export(run: Path, to: Path, *words: str) -> int:
    return main(["export", str(to), "--log-path", str(run), *words])


@pytest.mark.parametrize(
    ("words", "content", "version"),
    [([], "one", 1), (["--policy-version", "2"], "two", 2), (["--policy-version", "0"], "zero", 0)],
)
def test_the_policy_that_is_asked_for(
    run: Path,
    tmp_path: Path,
    words: list[str],
    content: str,
    version: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    to = tmp_path / "deep" / "out"
    assert export(run, to, "--json", *words) == 0
    assert (to / "model.safetensors").read_text() == content
    told = json.loads(capsys.readouterr().out)
    assert (told["policy_version"], told["checked"]) == (version, version > 0)
    assert [path.name for path in to.parent.iterdir()] == ["out"]


def test_where_model_pt_is_a_copy(run: Path, tmp_path: Path) -> None:
    RunPaths(run).served_model.unlink()
    RunPaths(run).served_model.mkdir()
    assert export(run, tmp_path / "out") == 0
    assert (tmp_path / "out" / "model.safetensors").read_text() == "two"


def test_what_is_wrong(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    assert export(run, tmp_path / "full") == 2
    assert "name a new folder" in capsys.readouterr().err
    assert export(run, tmp_path / "out", "--policy-version", "7") == 2
    assert "--policy-version 7: not on disk; there are 0, 1, 2" in capsys.readouterr().err
    (RunPaths(run).checkpoint(1, 1) / "model" / "model.safetensors").write_text("eno")
    assert export(run, tmp_path / "out") == 4
    assert "model.safetensors differs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
