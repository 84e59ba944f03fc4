"""The command line itself: what is imported, how errors become lines and exit codes, flags in any order."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import typed
from fake_run import long_run
from waiting import DEADLINE_S

from fsbarrier import errors
from fsbarrier.cli import COMMANDS, load_command
from fsbarrier.data import demo_tasks

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Makes `fsbarrier fake` a command that does what it is given."""

    def install(work: Callable[[argparse.Namespace], int]) -> None:
        module = types.ModuleType("fsbarrier.cli.commands.fake")
        module.__doc__, module.EXAMPLE, module.main = "fake", "fsbarrier fake", work  # type: ignore[attr-defined]
        module.add_arguments = lambda parser: parser.add_argument("--log-path")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fsbarrier.cli.commands.fake", module)
        monkeypatch.setitem(COMMANDS, "fake", "fake")

    return install


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def work(args: argparse.Namespace) -> int:
        raise error

    return work


# --- help ---------------------------------------------------------------------------------------------------------------


def test_without_a_command_help_and_exit_code_2() -> None:
    shown = typed(code=2)
    assert shown.out == ""
    assert all(name in shown.err for name in COMMANDS)


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_is_asked_for(word: str) -> None:
    assert "fsbarrier run --demo" in typed(word).out


def test_help_of_a_command_is_asked_for_in_either_order() -> None:
    assert typed("help", "stop").out == typed("stop", "--help").out != ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    shown = typed(name, "--help").out
    assert f"usage: fsbarrier {name}" in shown
    assert re.search(rf"example:\n +(fsbarrier|\./run\.sh|python -m fsbarrier\S*) ?{name}?", shown), shown


def test_help_shows_every_flag_of_the_contract() -> None:
    shown = typed("run", "--help").out
    flags = """--data-path --log-path --rl-phase --eval-interval --rollout-split --num-nodes --rank-weights --master --worker --rank
    --debug-mode --resume --iterations --model --program --min-nodes --on-node-failure --config --dry-run --demo key=value"""
    assert [flag for flag in flags.split() if flag not in shown] == []


def test_nothing_heavy_is_imported_for_help_and_mistakes() -> None:
    code = """
import sys
from fsbarrier.cli import main
for words in (["--help"], ["rnu"], ["run", "--rank-weigths", "1"], ["stop", "--log-path", "/nowhere"]):
    main(words)
heavy = "pydantic rich torch vllm transformers numpy httpx watchdog filelock".split()
print(sorted(set(heavy) & set(sys.modules)), file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


# --- flags --------------------------------------------------------------------------------------------------------------


def test_flags_and_settings_in_any_order() -> None:
    words = (
        "rollout.tasks=5",
        "--num-nodes",
        "2",
        "rollout.seed=7",
        "--dry-run",
        "--rank-weights",
        "1,2",
        "--json",
    )
    shown = json.loads(typed("run", "--program", "ping", "--master", *words, "rollout.samples=3").out)[
        "settings"
    ]
    assert (shown["num_nodes"], shown["rank_weights"]) == (2, [1.0, 2.0])
    assert {name: shown["rollout"][name] for name in ("tasks", "seed", "samples")} == dict(
        tasks=5, seed=7, samples=3
    )


# --- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("no\x1b[31m\nway"), 2),
        (errors.StoreError("gone"), 3),
        (errors.ProgramFailed("failed"), 4),
        (errors.TooFewNodes("alone"), 5),
        (errors.Fenced("newer"), 6),
    ],
)
def test_each_family_has_its_exit_code(error: Exception, code: int, command: Callable[..., None]) -> None:
    command(raising(error))
    lines = typed("fake", code=code).err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("fsbarrier: error: ")
    assert "\x1b" not in lines[0]


def test_a_failed_program_shows_its_last_log_lines(command: Callable[..., None]) -> None:
    command(raising(errors.ProgramFailed("node 1: update failed\n  | CUDA out\n  | of memory")))
    said = typed("fake", code=4)
    assert said.err.splitlines() == [
        "fsbarrier: error: node 1: update failed",
        "| CUDA out",
        "| of memory",
    ]


def test_a_bug_is_one_line_and_a_saved_traceback(
    tmp_path: Path, command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    command(raising(ZeroDivisionError("by zero\nindeed")))
    line = typed("fake", code=1).err
    assert line.count("\n") == 1
    found = re.fullmatch(
        r"fsbarrier: internal error: ZeroDivisionError: by zero indeed \(traceback: (.*)\)\n", line
    )
    assert found
    saved = Path(found[1])
    assert saved.parent == tmp_path
    assert "raise error" in saved.read_text()
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_saved_traceback_has_no_password(
    tmp_path: Path,
    command: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    command(raising(ZeroDivisionError("at http://me:canary@host")))
    said = typed("fake", code=1)
    (saved,) = tmp_path.iterdir()
    assert str(saved) in said.err and "me:***@host" in saved.read_text()


@pytest.mark.parametrize("words", [("--help",), ("status", "--no-watch", "--log-path", "run")])
def test_a_reader_that_has_left_is_a_signal_and_no_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    """`status` prints through rich, which ends the program itself then."""
    long_run(tmp_path / "run", 1)
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "fsbarrier", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


# --- dry run ------------------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_settings_and_commands_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("run", "--dry-run", "--num-nodes", "2", "--log-path", "run", "rollout.samples=4")
    shown = typed(*words).out
    assert "rollout.samples = 4" in shown and "# node 1" in shown
    assert re.search(r"10 update +.*fsbarrier\.workers\.torchrun", shown)
    value = json.loads(typed(*words, "--json").out)
    assert value["settings"]["num_nodes"] == 2
    assert {row["node_rank"] for row in value["commands"]} == {0, 1}
    assert {row["phase"] for row in value["commands"]} <= set(range(14))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_what_config_reads(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    words = ["run", "--dry-run", "--log-path", str(tmp_path / "run")]
    own = [
        f"--data-path={tmp_path}",
        f"--model={REPO}/fsbarrier/data/demo/model",
        "--num-nodes=2",
        "rank_weights=1,3",
    ]
    odd = [
        'custom.name=a "b" é',
        "custom.deep={a=[1,2],b=false}",
        'custom."my key"=x',
        'rollout.stop=["\\n"]',
    ]
    shown = typed(
        *words, *own, *odd, "engine.extra_args=--seed 3", "engine.max_model_len=64", "rollout.max_tokens=8"
    ).out
    (tmp_path / "again.toml").write_text(shown)
    again = typed(*words, "--config", tmp_path / "again.toml").out
    assert again == shown and 'custom.name = "a \\"b\\" é"' in shown and "= null" not in shown


@pytest.mark.parametrize(
    ("program", "package", "needed_for"),
    [
        ("rl", "vllm", "a run's engines"),
        ("rl", "torch", "a run's training"),
        ("toy", "torch", "a run's trajectory files"),
    ],
)
def test_a_wheel_without_extras_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, package: str, needed_for: str
) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    words = [
        "--program",
        program,
        "--log-path",
        tmp_path / "run",
        "engine.max_model_len=64",
        "rollout.max_tokens=8",
    ]
    if program == "rl":
        words += [f"--data-path={tmp_path}", f"--model={REPO}/fsbarrier/data/demo/model"]
    said = typed("run", *words, code=2).err
    assert f"the Python package {package}, for {needed_for}, is not installed" in said
    assert len(said.splitlines()) == 1
    assert re.search(r"-m pip install 'fsbarrier\[rl,(cpu|cuda)\]'", said)
    assert not (tmp_path / "run").exists()


def test_cuda_builds_beside_a_cpu_build_of_torch_are_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip alone installs them with the extra `cpu`."""
    builds = {
        "torch": "2.13.0+cpu",
        "torchvision": "0.28.0",
        "torchaudio": "2.13.0",
        "torchcodec": "0.9.0+cpu",
    }
    find_spec, version = importlib.util.find_spec, importlib.metadata.version
    shim = "torchvision_on_cpu"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == shim else find_spec(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: builds.get(name) or version(name))
    said = typed("run", "--log-path", tmp_path / "run", code=2).err
    assert f"{sys.executable} -m fsbarrier.doctor.{shim}" in said and len(said.splitlines()) == 1
    assert f"torchaudio 2.13.0 beside torch 2.13.0+cpu: type {sys.executable} -m pip uninstall" in said
    assert "torchcodec" not in said and not (tmp_path / "run").exists()


def test_epochs_are_iterations_by_the_number_of_tasks(tmp_path: Path) -> None:
    for name, count in (("train", 25), ("test", 1)):
        lines = [json.dumps({"prompt": f"{number} + 1", "answer": "2"}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    words = ["run", "--dry-run", "--json", "--log-path", tmp_path / "run", f"--data-path={tmp_path}"]
    words += [f"--model={demo_tasks.FOLDER}/model", "engine.max_model_len=64", "rollout.max_tokens=8"]

    def last(*more: object) -> object:
        return json.loads(typed(*words, *more).out)["settings"]["iterations"]

    # The remainder of a pass is skipped.
    assert last("--epochs", "3", "rollout.tasks=10") == 6
    # More tasks an iteration than there are.
    assert last("--epochs", "3", "rollout.tasks=96") == 3
    assert "also says when to stop" in typed(*words, "--epochs", "3", "--iterations", "5", code=2).err
    sets = ("train.sets.a.file=train.jsonl", "train.sets.b.file=test.jsonl")
    assert "there are 2 training sets; give --iterations" in typed(*words, "--epochs", "3", *sets, code=2).err
    weighted = typed(*words, "--epochs", "3", "train.reward_weights=0:2", code=2).err
    assert "train.reward_weights draws tasks by their rewards" in weighted
    assert "whole number" in typed(*words, "--epochs", "0.5", code=2).err


def test_a_shell_completes_commands_flags_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(*words: str) -> list[str]:
        return typed("--complete", *words).out.split()

    assert completed("sta") == ["status"] and {"eval", "rm", "jobs"} <= {*completed("")}
    assert completed("status", "--lo") == ["--log-path"]
    assert completed("run", "rollout.temp") == ["rollout.temperature="]
    assert completed("run", "--rank", "") == ["auto"] and completed("run", "--log-path", "") == []
    assert typed("--complete", "nothing", "x", code=2).out == ""
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "must be one of bash, zsh, fish" in typed("--install-completion", code=2).err
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    for shell in ("zsh", "fish", "bash"):
        monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
        assert f"it works in the next {shell}" in typed("--install-completion").out
    script = tmp_path / "bash-completion" / "completions" / "fsbarrier"
    (tmp_path / "fsbarrier").write_text(f'#!/bin/sh\nexec {sys.executable} -m fsbarrier "$@"\n')
    (tmp_path / "fsbarrier").chmod(0o755)
    typing = (
        f"source {script}; COMP_WORDS=(fsbarrier run rollout.temp); COMP_CWORD=2; _fsbarrier; echo $COMPREPLY"
    )
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(["bash", "-c", typing], env=environ, capture_output=True, text=True)
    assert done.stdout == "rollout.temperature=\n", done.stderr


def test_an_interrupt_while_modules_are_imported_says_nothing(tmp_path: Path) -> None:
    """The first module of Python's library that the command imports late sends it."""
    (tmp_path / "difflib.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", "fsbarrier", "status"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_dry_run_in_an_environment_that_only_shows_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing there says nothing of the nodes of a run; a start is refused. Elsewhere it is missing from the run too."""
    (tmp_path / "own.py").write_text("import a_package_of_the_nodes\ndef judge(answer, task): return 1.0\n")
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text('{"model_type": "qwen2", "chat_template": "x"}')
    (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    found, missing = importlib.util.find_spec, {"torch", "math_verify", "deepspeed", "mlflow"}
    words = ["run", "--log-path", str(tmp_path / "run"), "--data-path", str(tmp_path), "--model", str(model)]
    words += [
        f"reward.kind=math,{tmp_path}/own.py:judge",
        "trainer.backend=deepspeed",
        "tracker.names=mlflow",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else found(name))
        assert "mlflow" in typed(*words, "--dry-run", code=2).err
        patch.setattr(sys, "prefix", str(tmp_path / "light"))
        (tmp_path / "light").mkdir()
        (tmp_path / "light" / "only-shows-runs").touch()
        said = typed(*words, "--dry-run")
        assert "This is the light environment for dry runs" in said.out
        said = typed(*words, "--dry-run", "--json")
        assert json.loads(said.out)["light_environment"] is True
        assert "mlflow" in typed(*words, code=2).err
    typed(*words, "--dry-run", code=2)


def test_a_clone_keeps_its_runs_wherever_one_stands(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = typed("status", "--json", "--no-watch", code=None)
    assert str(checkout / "runs" / "default") in said.out + said.err
    monkeypatch.setenv("FSBARRIER_LOG_PATH", "mine")
    assert "mine: no run" in typed("status", code=2).err


# --- launch and logs, the parts without processes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [
        (">&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
        (">/dev/full", 3, "fsbarrier: error: the filesystem failed: [Errno 28] No space left on device\n"),
    ],
)
def test_output_that_goes_nowhere_ends_in_a_code_and_at_most_one_line(
    tmp_path: Path, redirection: str, code: int, says: str
) -> None:
    """What a file would get that has the number of a closed stdout is not what is printed."""
    line = f'exec "$0" -P -m fsbarrier runs "$1" {redirection}'
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, str(tmp_path)],
        capture_output=True,
        text=True,
        env=env,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (code, says)


def test_each_flag_of_each_command_is_typed_in_a_test(checkout: Path) -> None:
    """In a file in which the command is typed too. The flags of `run` are settings (options.py) or common to several commands."""
    texts = [path.read_text() for path in (checkout / "tests").glob("*.py")]
    common, missing = flags_of("run"), []
    for name in COMMANDS:
        typed = [text for text in texts if re.search(rf"[\"' ]{name}[\"' ]", text)]
        flags = flags_of(name) if name == "run" else flags_of(name) - common
        missing += [
            f"{name} {flag}"
            for flag in sorted(flags)
            if not any(f'"{flag}' in t or f" {flag}" in t for t in typed)
        ]
    assert missing == []


def flags_of(name: str) -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    load_command(name).add_arguments(parser)
    return {action.option_strings[-1] for action in parser._actions if action.option_strings}
