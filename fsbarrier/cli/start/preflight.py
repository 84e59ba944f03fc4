"""Checks before anything starts: run directory, reward, agent, engine, trainer command.

model_folder.py checks the model, task_files.py the tasks.

Each check raises UsageError with one line that names the flag, setting, file or line. The checks write no files and import no user code
into this process.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.errors import UsageError
from fsbarrier.host import accelerators
from fsbarrier.processes.supervisor import own_program, with_this_package
from fsbarrier.protocol.wording import counted
from fsbarrier.settings.sources import ChosenValue, nearest
from fsbarrier.settings.value_types import reward_kinds
from fsbarrier.store.mounts import mount_of

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

Environ = Mapping[str, str]
FREE_BYTES = 16 * 1024 * 1024
# Filesystems that do not support user files.
NO_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts")
# Timeout for importing the user's code: a large library on a slow filesystem takes minutes.
TRY_CODE_S = 600.0
REWARDS = ("exact", "numeric", "math", "judge")
PLACEHOLDERS = (
    *("node_rank", "num_nodes", "master_addr", "master_port"),
    *("batch", "out", "model", "trainer_state", "spec"),
)


# --- locations ----------------------------------------------------------------------------------------------------------


#: trackers whose Python package has another name; one of these packages is needed
TRACKER_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}


def checkout() -> Path | None:
    """The clone that this package runs from; None if it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def default_log_path(environ: Environ) -> Path:
    """$FSBARRIER_LOG_PATH, else runs/default in the clone (or in the current directory if there is no clone)."""
    named = environ.get("FSBARRIER_LOG_PATH", "").strip()
    return absolute(named) if named else (checkout() or Path.cwd()) / "runs" / "default"


def cache_folder(environ: Environ) -> Path:
    """The folder for files that later runs can reuse or recreate."""
    clone = checkout()
    if clone is not None and os.access(clone, os.W_OK):
        return clone / ".cache"
    return absolute(environ.get("XDG_CACHE_HOME") or "~/.cache") / "fsbarrier"


def absolute(path: str | Path) -> Path:
    """`path` as an absolute path, with `~` and `..` resolved; symbolic links are kept."""
    return Path(os.path.abspath(Path(path).expanduser()))


def with_absolute_paths(chosen: Iterable[ChosenValue]) -> list[ChosenValue]:
    """The same values with absolute paths. `model` is unchanged, because it may be a name."""
    result = []
    for item in chosen:
        value = item.value
        if isinstance(value, str) and value:
            if item.key == "update.trajectories":
                # Resolve links here, because files of another run are later opened without following links.
                value = str(absolute(value).resolve())
            elif item.key in ("data_path", "log_path", "init_from") or (
                item.key == "program" and value.endswith(".py")
            ):
                value = str(absolute(value))
            elif item.key in ("reward.kind", "rollout.agent") and ":" in value:
                value = ",".join(map(_with_absolute_file, reward_kinds(value)))
        result.append(ChosenValue(item.key, value, item.source))
    return result


def _with_absolute_file(named: str) -> str:
    file, colon, name = named.rpartition(":")
    return f"{absolute(file)}:{name}" if colon else named


# --- run directory ------------------------------------------------------------------------------------------------------


def check_log_path(path: Path, named: str = "--log-path") -> None:
    """Check that a directory to write to (`named` by this flag or command) exists or can be created, is writable, and has free space."""
    there = path
    while not there.exists() and there.parent != there:
        if there.is_symlink():
            raise UsageError(f"{named} {path}: {there} is a broken symbolic link")
        there = there.parent
    if not there.is_dir():
        raise UsageError(f"{named} {path}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{named} {path}: you have no write permission for {there}")
    try:
        kind, status = mount_of(there).kind, os.statvfs(there)
    except OSError as error:
        raise UsageError(f"{named} {path}: {there}: {error.strerror}") from None
    if kind in NO_FILES:
        raise UsageError(f"{named} {path}: {there} is a kernel filesystem ({kind}), which cannot store files")
    free = status.f_bavail * status.f_frsize
    if status.f_flag & os.ST_RDONLY:
        raise UsageError(f"{named} {path}: its filesystem is mounted read-only")
    if status.f_blocks and free < FREE_BYTES:
        raise UsageError(
            f"{named} {path}: its filesystem has {free / 1e6:.0f} MB free, and at least {FREE_BYTES / 1e6:.0f} MB are needed"
        )


# --- reward, engine, trainer -------------------------------------------------------------------------------------------------


def only_shows_runs() -> bool:
    """Whether this is the light environment for dry runs (scripts/requirements/light.txt). Packages missing from it may be installed on
    the nodes of a run."""
    return (Path(sys.prefix) / "only-shows-runs").exists()


def check_packages(settings: Settings, needs: Collection[str], environ: Environ) -> None:
    """Check that the required packages are installed and that the user's code can be imported. `needs`: those of the program."""
    check_trackers(settings.tracker.names)
    if "data" in needs:
        if "math" in reward_kinds(settings.reward.kind) and importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                "reward.kind=math: needs the package math-verify, which is not installed on this node"
            )
        try_user_code(settings)
    if "model" in needs:
        check_deepspeed(settings)


def check_accelerators(settings: Settings) -> None:
    """Check `--expect-gpus` as far as this node knows; of several, the leader counts all (run/admission.py)."""
    wanted = settings.expect_gpus
    if wanted is None:
        return
    there, needed_here = len(accelerators.detect()), wanted if settings.num_nodes == 1 else min(wanted, 1)
    if there < needed_here:
        raise UsageError(f"--expect-gpus {wanted}: this node has {counted(there, 'accelerator')}")


def check_reward(kinds: str) -> None:
    """Check that each reward is a known kind or a function defined in the given file."""
    for kind in reward_kinds(kinds):
        _check_one_reward(kind)


def _check_one_reward(kind: str) -> None:
    if ":" not in kind:
        if kind not in REWARDS:
            raise UsageError(
                f"reward.kind={kind}: must be {', '.join(REWARDS)} or path/file.py:function{nearest(kind, REWARDS)}"
            )
        return
    _defining("reward.kind", kind)


def _asks_judge(kind: str) -> bool:
    name, asked = kind.rpartition(":")[2], kind == "judge"
    if ":" in kind:
        for node in _defining("reward.kind", kind).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                asked = "judge" in {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return asked


def check_judge(settings: Settings, environ: Environ) -> None:
    """Check that a judge, if one is used, has a URL and a model, and that its API key variable is set on this node."""
    judge = settings.judge
    kind = next(filter(_asks_judge, reward_kinds(settings.reward.kind)), None)
    if kind is None:
        return
    if not judge.url or not judge.model:
        missing = "model" if judge.url else "url"
        raise UsageError(
            f"reward.kind={kind}: uses a judge, which needs judge.url and judge.model; judge.{missing} is not set"
        )
    if not judge.url.startswith(("http://", "https://")):
        raise UsageError(f"judge.url={judge.url}: must be a URL such as https://host/v1")
    if judge.api_key_env is not None and not environ.get(judge.api_key_env):
        raise UsageError(
            f"judge.api_key_env={judge.api_key_env}: this variable is not set on this node; export it"
        )


def check_agent(agent: str | None) -> None:
    """Check that the agent's file defines the class. `try_user_code` checks its interface later."""
    if agent is None:
        return
    if ":" not in agent:
        raise UsageError(f"rollout.agent={agent}: must be path/file.py:Class")
    _defining("rollout.agent", agent)


def try_user_code(settings: Settings) -> None:
    """Load the user's reward function and agent in a separate process, to detect a failing import or a wrong signature before anything
    starts. Raises UsageError."""
    kind, agent = settings.reward.kind, settings.rollout.agent
    named = [f"reward={one}" for one in reward_kinds(kind) if ":" in one]
    named += [f"agent={agent}"] if agent else []
    if not named:
        return
    command = own_program("fsbarrier.rollouts.try_user_code", *named)
    try:
        done = subprocess.run(
            command,
            env=with_this_package(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRY_CODE_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{' and '.join(named)}: importing this code took longer than {TRY_CODE_S:g} s; move slow work out of the module's top level"
        ) from None
    if done.returncode != 0:
        # The last line is the error. Output of the user's code comes before it.
        lines = done.stderr.strip().splitlines() or [f"its process ended with exit code {done.returncode}"]
        raise UsageError(lines[-1] if done.returncode == 2 else f"{' and '.join(named)}: {lines[-1]}")


def _defining(setting: str, value: str) -> ast.Module:
    """Parse the file of `value` ("path/file.py:name") and check that it defines the name. Raises UsageError."""
    file, _, name = value.rpartition(":")
    try:
        tree = ast.parse(Path(file).read_bytes(), filename=file)
    except OSError as error:
        raise UsageError(f"{setting}={value}: cannot read {file}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{setting}={value}: {file}{line}: {getattr(error, 'msg', error)}") from None
    names = _defined(tree)
    if name not in names:
        raise UsageError(f"{setting}={value}: {file} does not define {name}{nearest(name, names)}")
    return tree


def _defined(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names += [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names += [alias.asname or alias.name for alias in aliases]
    return names


def check_replay(settings: Settings) -> None:
    """Check that the rollouts in `update.trajectories` exist and were sampled with this run's sampling settings."""
    named = settings.update.trajectories
    if named is None:
        return
    from fsbarrier.rundir import runrecord
    from fsbarrier.rundir.paths import RunPaths

    path, prefix = Path(named), f"update.trajectories={named}"
    if not path.exists():
        raise UsageError(f"{prefix}: no such run directory or file")
    if path.is_dir():
        first = RunPaths(path).merged("train", 1)
        if not first.is_file():
            raise UsageError(f"{prefix}: has no merged training rollouts of iteration 1 ({first})")
        if runrecord.exists(path):
            sampled, own = runrecord.load(path).settings.rollout, settings.rollout
            for name in ("temperature", "top_p", "top_k"):
                theirs, ours = getattr(sampled, name), getattr(own, name)
                if theirs != ours:
                    wanted = f"rollout.{name}={theirs}"
                    raise UsageError(
                        f"{prefix}: was sampled with {wanted}, but this run has {ours}; set {wanted}"
                    )


def check_engine(settings: Settings, environ: Environ) -> None:
    """Check that this node has the accelerators that its servers need. For an existing server, check its URL and that its API key variable
    is set on this node."""
    from fsbarrier.engine.client import normal_url
    from fsbarrier.engine.placement import check_arguments, placements
    from fsbarrier.host import accelerators

    engine = settings.engine
    if settings.manages_engine:
        check_arguments(engine)
        placements(engine, accelerators.detect(environ), environ, sorted(os.sched_getaffinity(0)))
    if engine.url is not None:
        normal_url(engine.url)
    if engine.api_key_env is not None and not environ.get(engine.api_key_env):
        raise UsageError(
            f"engine.api_key_env={engine.api_key_env}: this variable is not set on this node; export it"
        )


def check_command(name: str, command: str) -> None:
    """Check that a command can be split into words and that its program exists on this node."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{name}={command}: {error}") from None
    if not words or not (shutil.which(words[0]) or Path(words[0]).is_file()):
        missing = f"program {words[0]!r} not found on this node" if words else "must not be empty"
        raise UsageError(f"{name}={command}: {missing}")


def check_deepspeed(settings: Settings) -> None:
    """If DeepSpeed is the trainer, check that it is installed."""
    trainer = settings.trainer
    used = trainer.backend == "deepspeed" and trainer.command is None
    if used and importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "trainer.backend=deepspeed: needs the package deepspeed, which is not installed on this node; install it with "
            "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
        )


def check_trainer(command: str | None) -> None:
    """Check that the trainer command exists on this node and has only known placeholders."""
    if command is None:
        return
    check_command("trainer.command", command)
    placeholders = re.findall(r"\{([A-Za-z_]+)\}", command)
    for name in placeholders:
        if name not in PLACEHOLDERS:
            hint = nearest(name, PLACEHOLDERS) or f"; available: {', '.join(PLACEHOLDERS)}"
            raise UsageError(f"trainer.command={command}: unknown placeholder {{{name}}}{hint}")
    if not {"out", "spec"}.intersection(placeholders):
        raise UsageError(
            f"trainer.command={command}: needs {{out}} (the output folder) or {{spec}} (a file that contains its path)"
        )


def check_trackers(names: Sequence[str]) -> None:
    """Check that the trackers' packages are installed on every node, because any node may become leader and run them. Without this
    check accelerate would silently skip a tracker. Raises UsageError."""
    for name in names:
        for package in (("accelerate",), TRACKER_PACKAGES.get(name, (name,))):
            if not any(importlib.util.find_spec(one) for one in package):
                raise UsageError(
                    f"tracker.names={','.join(names)}: {name} needs the Python package {' or '.join(package)}, which is not installed "
                    f"in {sys.prefix}; install it on every node, or drop {name}"
                )
