"""The programs in phases/ can be loaded from a wheel, from an editable install and from a bare checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import starts

PROGRAMS = {"rl.py", "sft.py", "toy.py", "ping.py"}
# What users write: rows of a program, a reward, and a script with barriers.
TYPED = """
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fsbarrier
from fsbarrier.decisions import RolloutDecision, RolloutReport
from fsbarrier.node import Node
from fsbarrier.program import Phase, Program
from fsbarrier.specs import Launch, Spec
from fsbarrier.trajectories import Trajectory, iter_trajectories


@dataclass(frozen=True)
class MyRollout(Spec[RolloutReport]):
    launch = Launch(("python", "my_rollout.py", "--spec", "{spec}"), "rollout.log")

    tasks: Sequence[int]


def rollout_train(node: Node) -> RolloutReport:
    tasks: Sequence[int] = node.context.decision("train_assign", RolloutDecision).shares[node.context.node_rank]
    report = node.run(MyRollout(node.context.identity, tasks))
    node.event("rolled_out", {"invalid": report.invalid})
    return report


PROGRAM = Program("mine", (Phase(0, "train_rollout", each=rollout_train),))


def score(prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    return float(response == answer)


def rewards(path: Path) -> list[float | None]:
    return [trajectory["reward"] for trajectory in iter_trajectories(path)]


def train(folder: str, rank: int) -> None:
    with fsbarrier.join(folder, node_rank=rank, num_nodes=2, timeout_s=60) as group:
        try:
            steps: list[int] = group.all_gather(3)
            group.barrier()
        except fsbarrier.PeerLost as lost:
            print(lost.rank, max(steps))
            group.regroup()
"""
SHOW = """
import json, pathlib, fsbarrier
from fsbarrier.loader import load_program, program_folder
names = ["rl", "sft", "toy", "ping"]
rows = {name: len(load_program(name).rows) for name in names}
print(json.dumps([str(pathlib.Path(fsbarrier.__file__).resolve().parent), str(program_folder()), rows]))
"""


def build(checkout: Path, out: Path, kind: str) -> Path:
    """A wheel or an sdist, made without the network by the build backend that this environment has."""
    hook = {"editable": "build_editable", "sdist": "build_sdist", "standard": "build_wheel"}[kind]
    code = f"import sys, hatchling.build as b; print(b.{hook}(sys.argv[1]))"
    result = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=checkout, capture_output=True, text=True, check=True
    )
    return out / result.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, tmp_path_factory.mktemp("wheel"), "standard")


def loaded(path: Path, cwd: Path) -> list[object]:
    """What a Python that has `path` in front of everything else finds, started somewhere else."""
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", SHOW], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    answer: list[object] = json.loads(result.stdout)
    return answer


def test_the_wheel_holds_the_programs_and_nothing_that_is_not_installed(wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert {f"fsbarrier/phases/{name}" for name in PROGRAMS} <= names
    assert {name.split("/")[0] for name in names} == {"fsbarrier", info}
    assert "fsbarrier/data/demo/model/model.safetensors" in names
    assert "fsbarrier/py.typed" in names and f"{info}/licenses/LICENSE" in names
    assert "fsbarrier = fsbarrier.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in metadata
    tracked = {
        str(path.relative_to(checkout))
        for path in (checkout / "fsbarrier").rglob("*.py")
        if "phases" not in path.parts
    }
    assert tracked <= names, "a module is missing from the wheel"


def copied(checkout: Path, target: Path, modes: int, time: int) -> Path:
    """What git tracks, as another person's clone has it: with other modes, and files of another day."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkout / name, file)
        file.chmod(modes | (0o111 if os.access(checkout / name, os.X_OK) else 0))
        os.utime(file, (time, time))
    return target


def test_two_people_build_the_same_and_it_could_be_published(checkout: Path, tmp_path: Path) -> None:
    made = []
    for name, modes, time in (("one", 0o644, 1_600_000_000), ("two", 0o664, 1_700_000_000)):
        clone = copied(checkout, tmp_path / name, modes, time)
        (tmp_path / f"{name}.out").mkdir()
        made.append([build(clone, tmp_path / f"{name}.out", kind) for kind in ("standard", "sdist")])
    for one, two in zip(*made, strict=True):
        assert one.name == two.name and one.read_bytes() == two.read_bytes(), one.name
    tools = Path(sys.executable).parent
    for argv in (
        [tools / "check-wheel-contents", made[0][0]],
        [tools / "twine", "--no-color", "check", "--strict", *made[0]],
    ):
        checked = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_all_programs_load_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    package, folder, rows = loaded(site, tmp_path)
    assert (package, folder) == (str(site / "fsbarrier"), str(site / "fsbarrier" / "phases"))
    assert rows == {"rl": 14, "sft": 14, "toy": 14, "ping": 14}
    # What a user of the wheel is told to type when pip has brought a CUDA build of torchvision beside a CPU build of torch.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    command = [environment / "bin" / "python", "-m", "fsbarrier.doctor.torchvision_on_cpu"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(site)}, cwd=tmp_path, check=True)
    code = "import sys; print([type(each).__name__ for each in sys.meta_path])"
    started = subprocess.run([*command[:1], "-I", "-c", code], capture_output=True, text=True, check=True)
    assert "Declares" in started.stdout


def test_all_programs_load_from_an_editable_install(checkout: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(checkout, tmp_path, "editable")) as archive:
        archive.extractall(tmp_path / "site")
    paths = [
        line for pth in (tmp_path / "site").glob("*.pth") for line in pth.read_text().split("\n") if line
    ]
    assert paths == [str(checkout)], "an editable install is the checkout on the path and nothing else"
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n{SHOW}"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert str(checkout / "phases") in result.stdout


def test_all_programs_load_from_a_bare_checkout(checkout: Path, tmp_path: Path) -> None:
    package, folder, rows = loaded(checkout, tmp_path)
    assert (package, folder) == (str(checkout / "fsbarrier"), str(checkout / "phases"))
    assert rows == {"rl": 14, "sft": 14, "toy": 14, "ping": 14}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_a_wheel_alone_has_the_light_commands(wheel: Path, tmp_path: Path, version: str) -> None:
    """In an empty environment of each Python that is installed here, outside any checkout."""
    if not starts(f"python{version}"):
        pytest.skip(f"python{version} is not installed")
    home = tmp_path / "home"
    home.mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(home)}
    env |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    subprocess.run([f"python{version}", "-m", "venv", tmp_path / "venv"], check=True, env=env)
    commands = tmp_path / "venv" / "bin"
    subprocess.run([commands / "pip", "install", "-q", wheel], check=True, env=env)

    def typed(*words: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [commands / "fsbarrier", *words], cwd=home, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    assert typed("--version").split() == ["fsbarrier", "0.1.0"]
    for words in (["run", "--program", "ping"], ["launch", "local", "--num-nodes", "2", "--program", "ping"]):
        typed(*words, "--iterations", "2", "--log-path", home / words[0])
        assert "finished" in typed("status", home / words[0])
    typed("report", home / "run", "--out", home / "report.html")
    assert "iteration 2 is done" in typed("logs", home / "run")
    assert "can support a run" in typed("doctor", home)
    assert "import torch: ModuleNotFoundError" in typed("doctor", "--self", code=2)
    typed("guard", "--", "sh", "-c", "exit 5", code=5)
    for words, package in (
        (["view", home / "run"], "nicegui"),
        (["run", "--demo"], "vllm"),
        (["run", "--program", "toy"], "torch"),
        (["plan", "--model", "qwen-7b"], "PyTorch"),
    ):
        said = typed(*words, code=2)
        assert package in said and "pip install 'fsbarrier[" in said.replace('"', "'"), said
    (home / "meet.py").write_text(
        "import sys, fsbarrier\n"
        "with fsbarrier.join('group', node_rank=int(sys.argv[1]), num_nodes=2) as group:\n"
        "    print(group.all_gather(group.node_rank + 5))\n"
    )
    members = [
        subprocess.Popen(
            [commands / "python", "meet.py", str(rank)],
            cwd=home,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [member.communicate(timeout=120)[0] for member in members] == ["[5, 6]\n"] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_user_writes_is_type_checked_against_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """`py.typed` is true: a program, an agent's reward and a script with barriers pass mypy --strict, and a mistake in each is found."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(pip, check=True)
    (tmp_path / "mine.py").write_text(TYPED)

    def checked() -> str:
        argv = [sys.executable, "-m", "mypy", "--strict", "--python-executable", tmp_path / "venv/bin/python"]
        argv += ["--no-warn-unused-ignores", "--config-file=", tmp_path / "mine.py"]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True).stdout

    assert "Success" in (said := checked()), said
    for right, wrong, expected in (
        ("group.all_gather(3)", "group.all_gather(src=3)", "Unexpected keyword"),
        ("report.invalid", "report.invalids", "has no attribute"),
        ("tasks: Sequence[int] = node", "tasks: Sequence[str] = node", "Incompatible types"),
    ):
        assert right in TYPED
        (tmp_path / "mine.py").write_text(TYPED.replace(right, wrong))
        assert expected in (said := checked()), said
