"""The programs in phases/ can be loaded from a wheel, from an editable install and from a bare checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROGRAMS = {"rl.py", "sft.py", "toy.py", "ping.py"}
SHOW = """
import json, pathlib, fsbarrier
from fsbarrier.loader import load_program, program_folder
names = ["rl", "sft", "toy", "ping"]
rows = {name: len(load_program(name).rows) for name in names}
print(json.dumps([str(pathlib.Path(fsbarrier.__file__).resolve().parent), str(program_folder()), rows]))
"""


def build(checkout: Path, out: Path, kind: str) -> Path:
    """One wheel, made without the network by the build backend that this environment has. `kind`: standard or editable."""
    code = (
        "import sys, hatchling.build as b; "
        f"print(b.build_{'editable' if kind == 'editable' else 'wheel'}(sys.argv[1]))"
    )
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
