"""Every command line in a code block of the documentation is executed: as it stands, as a dry run, or in a test that is named; a short
list says which are not, and why (documented_commands.py). Blocks under `<!-- tested -->` run in test_docs.py."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from documented_commands import (
    IN_ANOTHER_TEST,
    NO_COMMANDS,
    NOT_EXECUTED,
    TYPED,
    all_blocks,
    is_picked,
    listed,
    own_command,
    way,
)
from fake_run import FakeRun
from test_hygiene import ROOT
from test_planning import QWEN_7B, QWEN_72B
from waiting import until

from fsbarrier import cli

TESTS = Path(__file__).parent
BLOCKS = all_blocks()
LINES = [(block, line) for block in BLOCKS for line in block.command_lines()]


def lines_of(how: str, test: str = "") -> list[object]:
    """The command lines that are executed this way, for pytest; those that this test of AS_THEY_STAND picks, where it is named."""
    return [
        pytest.param(line, id=f"{block.place} {line.split()[0]}")
        for block, line in LINES
        if way(block, line) == how and not block.tested and (not test or is_picked(block, line, test))
    ]


# --- nothing is left out ------------------------------------------------------------------------------------------------


def test_each_command_line_is_executed_or_says_why_not() -> None:
    left = [f"{block.place}: {line}" for block, line in LINES if not way(block, line)]
    assert not left, "\n".join(left)
    assert len(LINES) > 100


def test_each_code_block_says_what_it_is() -> None:
    for block in BLOCKS:
        assert block.language in {"bash", *NO_COMMANDS}, f"{block.place}: {block.language or 'no language'}"
        if block.language != "bash":
            typed = [line for line in block.text.splitlines() if TYPED.match(line)]
            assert not typed, f"{block.place}: {typed[0]!r} stands in a block of {block.language}"


def test_what_is_not_executed_here_is_there_all_the_same() -> None:
    used = [(line, way(block, line)) for block, line in LINES]
    for entries, how in ((IN_ANOTHER_TEST, "another test"), (NOT_EXECUTED, "not executed")):
        for entry in entries:
            assert any(listed(line, {entry: ""}) for line, is_done in used if is_done == how), (
                f"nobody types {entry}"
            )
    for name in IN_ANOTHER_TEST.values():
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for line, how in used:
        if how in ("another test", "not executed"):
            assert not missing_of(line), line


def missing_of(line: str) -> list[str]:
    """What a line names of this repository, and is not there: its scripts and tests, and their flags."""
    words = shlex.split(line)
    files = [ROOT / word for word in words if re.match(r"(scripts|tests)/", word)]
    missing = [str(file) for file in files if not file.is_file()]
    for file in files:
        if "scripts" in file.parts and file.is_file():
            source = file.read_text()
            missing += [word for word in words if word.startswith("--") and f'"{word}"' not in source]
    return missing


# --- where they are executed --------------------------------------------------------------------------------------------


class Scene:
    """A clone, `/shared` and `/data` as the pages have them, below a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clone = folder, folder / "clone"
        self.shared, self.data = folder / "shared", folder / "data"
        self.default_run = self.shared / "runs" / "default"
        for path in (self.clone, self.shared / "runs", self.data):
            path.mkdir(parents=True)
        for name in ("run.sh", "scripts", "phases", "tests"):
            (self.clone / name).symlink_to(ROOT / name)
        for path in (
            self.data / "math",
            self.data / "shared",
            self.data / "smol",
            self.data / "talks",
            self.clone / "D",
            self.clone / "data",
        ):
            self.write_data(path)
        for name in ("M", "model", "Qwen2.5-7B-Instruct", "Qwen2.5-14B"):
            self.write_model(self.clone / name, QWEN_7B)
        self.write_model(self.clone / "Qwen2.5-72B-Instruct", QWEN_72B)
        scores = {"architectures": ["Qwen2ForSequenceClassification"]}
        self.write_model(self.clone / "my-reward-model", QWEN_7B | scores)
        (self.clone / "style.py").write_text(
            "def polite(prompt, response, answer, metadata):\n    return 1.0\n"
        )
        (self.clone / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}}')
        for name in ("mine.toml", "run.toml"):
            (self.clone / name).write_text("[rollout]\ntemperature = 0.9\n")
        environment = self.shared / "envs" / "mine" / "bin"
        environment.mkdir(parents=True)
        (environment / "python").symlink_to(sys.executable)
        # Trackers that need not be installed for the tests.
        for name in ("wandb", "tensorboard"):
            (folder / "packages" / name).mkdir(parents=True)
        tools = folder / "bin"
        tools.mkdir()
        for name, argv in (
            ("fsbarrier", [sys.executable, "-P", "-m", "fsbarrier"]),
            ("python", [sys.executable]),
        ):
            (tools / name).write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
            (tools / name).chmod(0o755)

    def write_data(self, path: Path) -> None:
        path.mkdir()
        for split in ("train", "test"):
            (path / f"{split}.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
        for name in ("Qwen2.5-0.5B-Instruct", "model"):
            self.write_model(path / name, QWEN_7B)

    def write_model(self, path: Path, config: dict[str, object]) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        (path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
        (path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{self.folder / 'packages'}",
            "FSBARRIER_VENV": sys.prefix,
            "FSBARRIER_LOG_PATH": str(self.default_run),
            "JUDGE_KEY": "secret",
            "COLUMNS": "120",
        }

    def here(self, text: str) -> str:
        """A line of a page, with this scene's folders."""
        return re.sub(r"(?<![\w./])/(shared|data)\b", rf"{self.folder}/\1", text)

    def run(self, line: str) -> subprocess.Popen[str]:
        """The line in a shell, as somebody types it; its output comes back."""
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"exec {self.here(line)}"],
            cwd=self.clone,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def output_of(self, line: str) -> str:
        """What the line prints; it must succeed."""
        process = self.run(line)
        output, _ = process.communicate()
        assert process.returncode == 0, f"{line}\n{output}"
        return output

    @contextlib.contextmanager
    def lasting(self, line: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on until Ctrl-C; it has printed something when this begins."""
        process = self.run(line)
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            assert first and "error" not in first, first
            yield process
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            process.wait()
            assert process.returncode in (0, 130), f"{line}\n{first}{rest}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def three_nodes(scene: Scene) -> Path:
    """The directory of a run that is there."""
    return FakeRun(scene.folder / "three-nodes", program="toy").log_path


# --- dry runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", lines_of("dry run"))
def test_dry_run(
    line: str,
    scene: Scene,
    three_nodes: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole start up to the point where something would begin: flags, settings, tasks, model, code of one's own."""
    for name, value in scene.env.items():
        monkeypatch.setenv(name, value)
    for word in shlex.split(line.partition("./run.sh")[0]):
        if "=" in word and not line.startswith("fsbarrier"):
            monkeypatch.setenv(*word.split("=", 1))
    monkeypatch.chdir(scene.clone)
    monkeypatch.syspath_prepend(scene.folder / "packages")
    words = own_command(scene.here(line))
    assert words
    log_path = Path(words[words.index("--log-path") + 1]) if "--log-path" in words else scene.default_run
    # A worker joins a run that is there, and a setting is changed of one.
    joins = "--worker" in words or ("--data-path" not in words and "--log-path" in words)
    if joins:
        log_path.symlink_to(three_nodes)
    try:
        assert cli.main([*words, *([] if "--dry-run" in words else ["--dry-run"])]) == 0, (
            capsys.readouterr().err
        )
    finally:
        if joins:
            log_path.unlink()
    assert not log_path.exists()


# --- as they stand ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize("line", lines_of("itself", "test_plan"))
def test_plan(
    line: str, scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan as it is typed; where the page shows what it prints, that is what it prints."""
    monkeypatch.chdir(scene.clone)
    monkeypatch.setenv("COLUMNS", "1000")
    words = own_command(line)
    assert words and cli.main(words) == 0
    printed = capsys.readouterr().out
    shown = [block.text.partition("\n")[2] for block in BLOCKS if block.text.startswith(f"$ {line}\n")]
    assert all(printed == text for text in shown), printed


@pytest.mark.parametrize("line", lines_of("itself", "test_check_sh"))
def test_check_sh(line: str, scene: Scene, tmp_path: Path) -> None:
    """What it would start: a stand-in for Python writes it down. pytest's own words are pytest's."""
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "python").write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "$*" >> {tmp_path}/said\n')
    (tools / "lint-imports").write_text("#!/bin/sh\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    env = {**scene.env, "FSBARRIER_VENV": str(tools.parent)}
    subprocess.run(shlex.split(line), cwd=ROOT, env=env, check=True, capture_output=True)
    *checks, pytest_words = (tmp_path / "said").read_text().splitlines()
    assert len(checks) == 7 and pytest_words.startswith("-m pytest ")
    assert {"-m compileall -q fsbarrier phases", "-m pytest --collect-only"} < {*checks}
    flags = {word for word in pytest_words.split()[2:] if word.startswith("-")}
    assert flags <= {"-m", "-n", "--dist", "-x", "--durations=10"} and not missing_of(pytest_words)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_operating_and_of_trajectories(tmp_path: Path) -> None:
    """On a run of two nodes that goes on until the page stops it."""
    scene = Scene(tmp_path)
    (scene.clone / "some" / "merged").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(scene.folder, 2, "toy.phase_s=0", "toy.tasks=4"))
        cluster.log_path = scene.shared / "runs" / "a"
        scene.default_run.symlink_to(cluster.log_path)
        (scene.shared / "runs" / "b").symlink_to(cluster.log_path)
        cluster.start()
        cluster.wait_for(lambda e: (e["event"], e["iteration"]) == ("phase_started", 6), deadline_s=900)
        (scene.clone / "some" / "merged" / "file").symlink_to(
            cluster.log_path / "train_trajectories" / "train_trajectories.pt.iteration5"
        )
        for param in lines_of("itself", "test_the_commands_of_operating_and_of_trajectories"):
            (line,) = param.values  # type: ignore[attr-defined]
            if line.startswith("fsbarrier top"):
                stack.enter_context(scene.lasting(line))
            elif "--num-nodes 3 --master" in line:
                others = [scene.run(line.replace("--master", f"--worker {rank}")) for rank in (1, 2)]
                scene.output_of(line)
                assert [other.communicate() and other.returncode for other in others] == [0, 0]
            else:
                scene.output_of(line)
            if line.startswith("fsbarrier stop"):
                assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
    assert (scene.clone / "report.html").stat().st_size > 10_000
    assert (scene.clone / "five.parquet").stat().st_size and (scene.clone / "mine.jsonl").stat().st_size


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_a_pool(tmp_path: Path) -> None:
    """With two machines in the pool, which is what the job asks for."""
    scene = Scene(tmp_path)
    with contextlib.ExitStack() as stack:
        for param in lines_of("itself", "test_the_commands_of_a_pool"):
            (line,) = param.values  # type: ignore[attr-defined]
            if line.startswith("fsbarrier daemon"):
                for _ in range(2):
                    stack.enter_context(scene.lasting(line))
            elif line.startswith("fsbarrier jobs logs"):
                wait_for_first_lines(scene.shared / "pool")
                assert "node" in scene.output_of(line)
            else:
                scene.output_of(line)


def wait_for_first_lines(pool: Path) -> None:
    """Wait until some job of the pool has printed something."""
    until(lambda: any(log.stat().st_size for log in pool.rglob("*.log")))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.engine
@pytest.mark.torch
def test_the_demo(tmp_path: Path) -> None:
    """`./run.sh --demo` as the README has it, with a run directory of its own."""
    ((line,),) = [param.values for param in lines_of("itself", "test_the_demo")]  # type: ignore[attr-defined]
    scene = Scene(tmp_path)
    output = scene.output_of(line)
    rewards = [float(reward) for reward in re.findall(r"held-out reward (\d\.\d+)", output)]
    assert len(rewards) >= 6 and rewards[-1] > rewards[0], output
