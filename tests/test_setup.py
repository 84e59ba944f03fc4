"""How a clone gets its environment: run.sh, scripts/check.sh and what they call, with a tiny set of packages and no network."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from other_user import UID, needs_root
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "scripts" / "requirements"
TOOLS = ["bash", "dirname", "env", "readlink", "sha256sum", "sh", "uname"]
MAIN = "import os, sys; print('STARTED', os.getpid(), sys.argv[1:], flush=True)\n"

sys.path.insert(0, str(ROOT / "scripts"))
import setup_packages  # noqa: E402

from fsbarrier.doctor import torchvision_on_cpu  # noqa: E402


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tiny package in it."""
    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "ANSWER = 42\n")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(
            "tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\ntiny-1.0.dist-info/METADATA,,\n")
    return folder


@pytest.fixture
def tiny(wheels: Path) -> str:
    """A lock file's line for it."""
    (wheel,) = wheels.iterdir()
    return f"tiny==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture
def clone(tmp_path: Path, tiny: str) -> Path:
    """A clone whose path has a space and a bracket, with a stand-in for the package."""
    folder = tmp_path / "my [clone] of it"
    shutil.copytree(
        ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__", "requirements")
    )
    shutil.copy2(ROOT / "run.sh", folder)
    (folder / "fsbarrier").mkdir()
    (folder / "fsbarrier" / "__init__.py").touch()
    (folder / "fsbarrier" / "__main__.py").write_text(MAIN)
    locks = folder / "scripts" / "requirements"
    locks.mkdir()
    for name in ("cpu", "cuda", "rocm", "light", "dev"):
        (locks / f"{name}.txt").write_text(f"# {name}\n{tiny}")
    return folder


@pytest.fixture
def env(wheels: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a first start without network."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
        "FSBARRIER_FLAVOR": "cpu",
        "FSBARRIER_PYTHON": sys.executable,
        "CI": "true",
    }


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with the few tools that the scripts use and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        there = shutil.which(name)
        assert there
        (folder / name).symlink_to(there)
    return folder


def start(clone: Path, env: dict[str, str], *flags: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """`run.sh` without standard input, output and errors in one stream."""
    return subprocess.Popen(
        [str(clone / "run.sh"), *flags],
        cwd=cwd or clone,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(clone: Path, env: dict[str, str], *flags: str, cwd: Path | None = None) -> tuple[int, str]:
    """The same to its end: exit code and output."""
    process = start(clone, env, *flags, cwd=cwd)
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def environments(clone: Path) -> list[str]:
    """The environments that are there, and what was left of one, without the link."""
    return sorted(path.name for path in clone.glob(".venv-*/"))


# --- run.sh --------------------------------------------------------------------------------------------------------------


def test_the_first_start_makes_the_environment_and_the_second_only_uses_it(
    clone: Path, tiny: str, env: dict[str, str], bare_path: Path, tmp_path: Path
) -> None:
    process = start(clone, env, "--demo", "a b", cwd=tmp_path)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert f"STARTED {process.pid} ['run', '--demo', 'a b']" in output, "run.sh hands over with exec"
    assert "virtual environment" in output and "installing 1 packages" in output
    (name,) = environments(clone)
    assert (clone / ".venv").resolve() == clone / name

    # No Python but the environment's own is on PATH now, so nothing can be set up or even looked up.
    code, output = run(
        clone, {"PATH": str(bare_path), "FSBARRIER_FLAVOR": "cpu"}, "--worker", "2", cwd=tmp_path
    )
    assert (code, len(output.splitlines())) == (0, 1) and "['run', '--worker', '2']" in output

    # The package is the clone's own source, also for a command that starts elsewhere.
    (clone / "fsbarrier" / "__main__.py").write_text("print('edited')\n")
    result = subprocess.run(
        [clone / ".venv" / "bin" / "fsbarrier", "status"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert result.stdout == "edited\n"

    # Another lock file is another environment; the one that may be in use stays.
    (clone / "scripts" / "requirements" / "cpu.txt").write_text(f"# newer\n{tiny}")
    code, output = run(clone, env)
    assert code == 0, output
    assert len(environments(clone)) == 2 and (clone / ".venv").resolve().name != name


@pytest.mark.slow
def test_what_only_shows_something_waits_for_no_whole_environment(
    clone: Path, env: dict[str, str], bare_path: Path
) -> None:
    code, output = run(clone, env, "--demo", "--dry-run")
    assert code == 0 and "STARTED" in output, output
    (light,) = environments(clone)
    assert light.startswith(".venv-light-") and not (clone / ".venv").exists()
    assert (clone / light / setup_packages.ONLY_SHOWS_RUNS).exists()
    for word in ("--dry-run", "--help"):
        code, output = run(clone, {"PATH": str(bare_path), "FSBARRIER_FLAVOR": "cpu"}, word)
        assert code == 0 and len(output.splitlines()) == 1

    # A start makes the whole one, which then serves for everything.
    code, output = run(clone, env, "--demo")
    assert code == 0, output
    (whole,) = set(environments(clone)) - {light}
    assert whole.startswith(".venv-cpu-") and (clone / ".venv").resolve().name == whole
    assert not (clone / whole / setup_packages.ONLY_SHOWS_RUNS).exists()
    (clone / light / "bin" / "python").unlink()
    for word in ("--dry-run", "--help"):
        code, output = run(clone, {"PATH": str(bare_path), "FSBARRIER_FLAVOR": "cpu"}, word)
        assert code == 0 and len(output.splitlines()) == 1


@pytest.mark.slow
def test_a_program_of_ones_own_is_shown_with_all_that_it_may_import(clone: Path, env: dict[str, str]) -> None:
    code, output = run(clone, env, "--program", "./mine.py", "--dry-run")
    assert code == 0, output
    (whole,) = environments(clone)
    assert whole.startswith(".venv-cpu-")


@pytest.mark.slow
def test_an_environment_for_rocm_lies_on_top_of_a_python_that_has_vllm(
    clone: Path, env: dict[str, str], tmp_path: Path
) -> None:
    """As in the images that have builds for ROCm, whose Python may be that of a virtual environment itself."""
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", image], check=True)
    env |= {"FSBARRIER_FLAVOR": "rocm", "FSBARRIER_PYTHON": str(image / "bin" / "python")}
    code, output = run(clone, env)
    assert (
        code == 2
        and f"has no {', '.join(setup_packages.BENEATH)}: " in output
        and len(output.splitlines()) == 1
    )
    assert environments(clone) == []

    (packages,) = image.glob("lib/python*/site-packages")
    for module in (setup_packages.PROOF.get(name, name) for name in setup_packages.BENEATH):
        file = packages.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (packages / "tiny.py").write_text("ANSWER = 6\n")
    (clone / "fsbarrier" / "__main__.py").write_text("import tiny, vllm; print(tiny.ANSWER, vllm.__path__)\n")
    code, output = run(clone, env)
    assert code == 0, output
    assert output.splitlines()[-1].startswith("42 ") and str(packages / "vllm") in output
    (name,) = environments(clone)
    assert name.startswith(".venv-rocm-")


def test_two_first_starts_at_once_share_one_setup(clone: Path, env: dict[str, str]) -> None:
    processes = [start(clone, env, str(number)) for number in range(2)]
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len(environments(clone)) == 1
    assert sum("this happens once" in output for output in outputs) == 1
    assert sum("waiting for the setup that is under way" in output for output in outputs) == 1
    assert all("STARTED" in output for output in outputs)


def environment_path(clone: Path) -> Path:
    """Where this clone's environment will be."""
    digest = hashlib.sha256((clone / "scripts" / "requirements" / "cpu.txt").read_bytes()).hexdigest()[:8]
    tag = f"py{sys.version_info[0]}{sys.version_info[1]}"
    return clone / f".venv-cpu-{os.uname().machine}-{tag}-{digest}"


@contextlib.contextmanager
def setup_under_way(environment: Path) -> Iterator[Path]:
    """What a start sees while another one makes the environment: its lock is held. Gives the lock's path."""
    lock = environment.with_name(f"{environment.name}.lock")
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield lock


def test_a_killed_setup_is_made_again_and_what_it_left_is_removed(clone: Path, env: dict[str, str]) -> None:
    environment = environment_path(clone)
    left = environment.with_name(f"{environment.name}.making-abc")
    left.mkdir()
    with setup_under_way(environment):
        second = start(clone, env)
        assert second.stdout is not None
        assert next(line for line in second.stdout if "waiting for the setup" in line)
    output, _ = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0 and f"removing {left.name}" in output, output
    assert environments(clone) == [environment.name]


@pytest.mark.slow
def test_who_waits_for_a_setup_that_fails_fails_with_its_reason(clone: Path, env: dict[str, str]) -> None:
    with setup_under_way(environment_path(clone)) as lock:
        second = start(clone, env)
        assert second.stdout is not None
        assert next(line for line in second.stdout if "waiting for the setup" in line)
        lock.write_text("failed on gpu-1: no such package\n")
    output, _ = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 2 and "waited for failed on gpu-1: no such package" in output
    # A later start tries again.
    code, output = run(clone, env)
    assert code == 0, output


@pytest.mark.slow
def test_the_first_of_two_that_were_made_at_once_stays(clone: Path, env: dict[str, str]) -> None:
    """As on a filesystem without locks: the second finds the name taken when it is done."""
    environment = environment_path(clone)
    (clone / "scripts" / "requirements" / "cpu.txt").touch()
    with setup_under_way(environment):
        second = start(clone, {**env, "FSBARRIER_SETUP_TIMEOUT_S": "0"})
        assert second.stdout is not None
        assert next(line for line in second.stdout if "this happens once" in line)
        (environment / "bin").mkdir(parents=True)
        (environment / "bin" / "python").symlink_to(sys.executable)
        (environment / ".made-for").write_text("another clone\n")
        (environment / "first").touch()
    output, _ = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, output
    assert environments(clone) == [environment.name] and (environment / "first").exists()


def test_an_environment_whose_python_this_machine_lacks_is_refused(clone: Path, env: dict[str, str]) -> None:
    environment = environment_path(clone)
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to("/nowhere/python3")
    code, output = run(clone, env)
    assert code == 2 and "/nowhere/python3, which this machine does not have" in output
    assert output.count("\n") == 1 and "FSBARRIER_VENV" in output


def test_a_flavour_follows_the_driver(clone: Path, bare_path: Path) -> None:
    script = 'set -eu; source "$0/scripts/environment.sh"; choose_flavour; echo "$flavour"'
    env = {"PATH": str(bare_path)}
    present = [
        Path("/proc/driver/nvidia/version"),
        Path("/dev/nvidiactl"),
        Path("/usr/lib/wsl/lib/libcuda.so.1"),
    ]
    present += [*Path("/usr/lib").glob("*/libcuda.so.1"), Path("/usr/lib64/libcuda.so.1")]
    driver = any(path.exists() for path in present)
    argv = ["bash", "-c", script, str(clone)]
    assert subprocess.check_output(argv, env=env, text=True) == ("cuda\n" if driver else "cpu\n")
    (bare_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\n")
    (bare_path / "nvidia-smi").chmod(0o755)
    assert subprocess.check_output(argv, env=env, text=True) == "cuda\n"


def test_an_environment_made_by_hand_is_used_as_it_is(clone: Path, bare_path: Path, tmp_path: Path) -> None:
    own = tmp_path / "own" / "bin"
    own.mkdir(parents=True)
    python = own / "python"
    # For `-c` it says which packages are missing: none.
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    environ = {"PATH": str(bare_path), "FSBARRIER_VENV": "own"}
    code, output = run(clone, environ, "--demo", cwd=tmp_path)
    assert (code, output) == (0, f"{clone} -P -m fsbarrier run --demo\n")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    code, output = run(clone, environ, "--demo", cwd=tmp_path)
    assert code == 2 and f"{tmp_path}/own has no filelock jinja2 watchdog rich msgspec: " in output
    assert output.count("\n") == 1 and "-m pip install -r" in output


@pytest.mark.slow
def test_the_environment_with_the_tools_serves_the_product_too(clone: Path, env: dict[str, str]) -> None:
    (clone / "scripts" / "requirements" / "cpu.txt").write_text("# nothing\n")
    check = [clone / "scripts" / "check.sh"]
    result = subprocess.run(check, env=env, cwd="/", capture_output=True, text=True)
    # Which this set of tools lacks: it stopped at the first check.
    assert "No module named ruff" in result.stderr
    (name,) = environments(clone)
    assert re.search(r"-dev-[0-9a-f]{8}$", name)
    code, output = run(clone, env, "--demo")
    assert code == 0 and environments(clone) == [name] and "setup" not in output
    python = [clone / ".venv" / "bin" / "python", "-c", "import tiny; print(tiny.ANSWER)"]
    assert subprocess.check_output(python) == b"42\n"


def test_a_failing_installation_is_told_in_one_line(clone: Path, env: dict[str, str]) -> None:
    (clone / "scripts" / "requirements" / "cpu.txt").write_text(f"nowhere==1.0 --hash=sha256:{'0' * 64}\n")
    code, output = run(clone, env)
    assert code == 2 and "No matching distribution found for nowhere==1.0" in output.splitlines()[-1], output
    assert "STARTED" not in output and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("lock", ["cpu", "dev"])
def test_a_file_that_the_lock_does_not_name_is_not_installed(
    lock: str, clone: Path, env: dict[str, str]
) -> None:
    path = clone / "scripts" / "requirements" / f"{lock}.txt"
    path.write_text(path.read_text()[:-2] + ("0" if path.read_text()[-2] != "0" else "1") + "\n")
    command = [clone / "run.sh"] if lock == "cpu" else [clone / "scripts" / "check.sh"]
    if lock == "dev":
        (path.parent / "cpu.txt").write_text("# nothing\n")
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2 and "STARTED" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert "gives for tiny==1.0" in last and "its SHA-256 differs" in last, done.stderr
    assert not list(clone.rglob("tiny.py"))


def test_a_package_without_a_digest_is_not_installed(clone: Path, env: dict[str, str]) -> None:
    (clone / "scripts" / "requirements" / "cpu.txt").write_text("tiny==1.0\n")
    code, output = run(clone, env)
    assert code == 2 and "Hashes are required" in output and "STARTED" not in output


# --- the lock files ------------------------------------------------------------------------------------------------------


def pins(flavour: str) -> dict[str, Requirement]:
    """What a lock file names, by canonical name."""
    lines = [line.split(" --hash")[0] for line in setup_packages.pins(LOCKS / f"{flavour}.txt").values()]
    return {canonicalize_name(found.name): found for found in map(Requirement, lines)}


def stated(*extras: str) -> Iterator[Requirement]:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from map(Requirement, project["dependencies"])
    for extra in extras:
        yield from map(Requirement, project["optional-dependencies"][extra])


def version(pin: Requirement) -> str:
    return next(iter(pin.specifier)).version


@pytest.mark.parametrize(("flavour", "extras"), [("cpu", ["rl", "cpu"]), ("cuda", ["rl", "cuda"])])
def test_a_lock_file_holds_what_the_project_asks_for(flavour: str, extras: list[str]) -> None:
    locked = pins(flavour)
    for wanted in stated(*extras):
        pin = locked[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version(pin)), f"{wanted}: locked is {pin}"
    assert all(
        len(pin.specifier) == 1 and next(iter(pin.specifier)).operator in ("==", "===")
        for pin in locked.values()
    )
    assert version(locked["torch"]) == ("2.13.0+cpu" if flavour == "cpu" else "2.13.0")


@pytest.mark.parametrize("flavour", ["cpu", "cuda", "rocm", "light", "dev"])
def test_each_package_has_the_digests_of_its_files_and_names_no_index(flavour: str) -> None:
    lines = setup_packages.pins(LOCKS / f"{flavour}.txt")
    for name, line in lines.items():
        pin, *found = line.split("--hash=sha256:")
        assert found and all(re.fullmatch(r"[0-9a-f]{64} *", digest) for digest in found), name
        assert "/" not in pin
    if "torch" in lines:
        # Of four Pythons on two kinds of machine.
        assert lines["torch"].count("--hash") == 8


def test_the_tools_change_nothing_in_the_environment_they_are_added_to() -> None:
    tools = pins("dev")
    for flavour in ("cpu", "cuda"):
        differing = {
            name
            for name, pin in pins(flavour).items()
            if name in tools and version(tools[name]) != version(pin)
        }
        assert not differing


def test_this_environment_is_complete() -> None:
    """No locked package misses one that it needs, but those left out on purpose."""
    left_out = {"torchvision", "torchaudio", "torchcodec", "triton"}
    missing = []
    for name in pins("cpu"):
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an environment for GPUs, or made by hand
        for needed in map(Requirement, distribution.requires or []):
            wanted = canonicalize_name(needed.name)
            if wanted in left_out or (needed.marker and not needed.marker.evaluate({"extra": ""})):
                continue
            try:
                there = metadata.version(wanted)
            except metadata.PackageNotFoundError:
                missing.append(f"{name} needs {needed}")
                continue
            if not needed.specifier.contains(there, prereleases=True):
                missing.append(f"{name} needs {needed}, there is {there}")
    assert not missing


@pytest.mark.torch
def test_a_cuda_build_of_torchvision_can_be_imported_beside_a_cpu_build_of_torch(tmp_path: Path) -> None:
    """What that needs of its own library, which is not loaded there: that the operator exists."""
    torchvision_on_cpu.put_into(tmp_path)
    (tmp_path / "torchvision.py").write_text(
        "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(dets, scores, iou): ...\n"
    )
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import torchvision"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
    without = (
        "import sys; sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != 'Declares']\n"
        f"sys.path.insert(0, {str(tmp_path)!r}); import torchvision"
    )
    assert subprocess.run([sys.executable, "-I", "-c", without], capture_output=True).returncode == 1


@needs_root
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python that another user can start")
def test_an_environment_that_another_user_made_is_used_or_said_to_be_theirs(
    clone: Path, env: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="clone-", dir="/tmp") as outside:
        # Not in pytest's folder, which the other user cannot enter.
        there = Path(outside, "clone")
        shutil.copytree(clone, there)
        env |= {"FSBARRIER_PYTHON": "/usr/bin/python3", "HOME": "/nonexistent"}
        tag = subprocess.run(
            ["/usr/bin/python3", "-c", "import sys; print('py%d%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        lock = there / "scripts" / "requirements" / "cpu.txt"
        digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:8]
        made = there / f".venv-cpu-{os.uname().machine}-{tag}-{digest}"
        (made / "bin").mkdir(parents=True)
        (made / "bin" / "python").symlink_to("/usr/bin/python3")
        # It has no package of this clone.
        (made / ".made-for").write_text("another clone\n")
        subprocess.run(["chmod", "-R", "a+rX", outside], check=True)

        def as_other() -> tuple[int, str]:
            done = subprocess.run(
                [str(there / "run.sh"), "--master"],
                env=env,
                user=UID,
                group=UID,
                extra_groups=[],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            return done.returncode, done.stdout + done.stderr

        code, output = as_other()
        assert code == 0 and "['run', '--master']" in output, output
        made.chmod(0o700)
        code, output = as_other()
        assert code == 2 and len(output.splitlines()) == 1, output
        assert f"{made} belongs to user id 0 and cannot be used by you: ask them for chmod -R a+rX" in output


@needs_root
def test_a_second_user_of_a_clone_gets_a_default_run_directory_of_his_own() -> None:
    with tempfile.TemporaryDirectory(prefix="clone-", dir="/tmp") as outside:
        there, home = Path(outside, "clone"), Path(outside, "home")
        for folder in ("fsbarrier", "phases"):
            shutil.copytree(
                ROOT / folder, there / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
            )
        shutil.copy(ROOT / "pyproject.toml", there)
        (there / "runs").mkdir(mode=0o700)
        home.mkdir()
        os.chown(home, UID, UID)
        Path(outside).chmod(0o755)
        # It may read all folders, because this Python may lie in one that only root can enter.
        caps = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
        command = [
            "setpriv",
            f"--reuid={UID}",
            f"--regid={UID}",
            "--clear-groups",
            *caps,
            sys.executable,
            "-m",
        ]
        environ = {**os.environ, "PYTHONPATH": str(there), "HOME": str(home), "TMPDIR": str(home)}
        flags = ("run", "--program", "ping", "--iterations", "1")
        done = subprocess.run(
            [*command, "fsbarrier", *flags], env=environ, cwd=there, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert (home / "fsbarrier-runs" / "default" / "run.json").is_file()
        assert not [*(there / "runs").iterdir()]
