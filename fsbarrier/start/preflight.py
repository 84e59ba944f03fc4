"""What is checked before anything starts: run directory, reward, agent, engine, trainer command.

The model is checked in model_folder.py, the tasks in task_files.py.

Each check raises UsageError with one line that names the flag, setting, file or line. Nothing is written, and nothing that belongs
to the user is imported into this process.
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
from fsbarrier.host.mounts import mount_of
from fsbarrier.settings.sources import ChosenValue, nearest
from fsbarrier.settings.value_types import reward_kinds
from fsbarrier.supervision.supervisor import own_program, with_this_package

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

Environ = Mapping[str, str]
FREE_BYTES = 16 * 1024 * 1024
# Filesystems in which nobody can make files.
NO_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts")
# How long the user's code may take to be imported: a large library on a slow filesystem takes minutes.
TRY_CODE_S = 600.0
REWARDS = ("exact", "numeric", "math", "judge")
PLACEHOLDERS = (
    *("node_rank", "num_nodes", "master_addr", "master_port"),
    *("batch", "out", "model", "trainer_state", "spec"),
)


# --- where things are ---------------------------------------------------------------------------------------------------


#: the Python packages of which a tracker needs one, where it is not called the same
TRACKER_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}


def checkout() -> Path | None:
    """The clone that this package runs from; None where it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def default_log_path(environ: Environ) -> Path:
    """$FSBARRIER_LOG_PATH, else runs/default in the clone (or, where there is none, below the current directory)."""
    named = environ.get("FSBARRIER_LOG_PATH", "").strip()
    return absolute(named) if named else (checkout() or Path.cwd()) / "runs" / "default"


def cache_folder(environ: Environ) -> Path:
    """The folder for what a later run can use again, and could make anew."""
    clone = checkout()
    if clone is not None and os.access(clone, os.W_OK):
        return clone / ".cache"
    return absolute(environ.get("XDG_CACHE_HOME") or "~/.cache") / "fsbarrier"


def absolute(path: str | Path) -> Path:
    """`path` without `~`, `..` and dependence on the current directory; links are kept."""
    return Path(os.path.abspath(Path(path).expanduser()))


def with_absolute_paths(chosen: Iterable[ChosenValue]) -> list[ChosenValue]:
    """The same values, paths made independent of the current directory. `model` is left: it may be a name."""
    result = []
    for item in chosen:
        value = item.value
        if isinstance(value, str) and value:
            if item.key == "update.trajectories":
                # Links are followed once, here: a file in another run is opened without following any.
                value = str(absolute(value).resolve())
            elif item.key in ("data_path", "log_path", "trainer.deepspeed", "init_from") or (
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


def check_log_path(path: Path) -> None:
    """The run directory can be made, or is there and can be written to; its filesystem has room."""
    there = path
    while not there.exists() and there.parent != there:
        if there.is_symlink():
            raise UsageError(f"--log-path {path}: {there} is a link to nowhere")
        there = there.parent
    if not there.is_dir():
        raise UsageError(f"--log-path {path}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--log-path {path}: {there} is not writable for you")
    try:
        kind, status = mount_of(there).kind, os.statvfs(there)
    except OSError as error:
        raise UsageError(f"--log-path {path}: {there}: {error.strerror}") from None
    if kind in NO_FILES:
        raise UsageError(f"--log-path {path}: {there} is the kernel's own ({kind}), and keeps no files")
    free = status.f_bavail * status.f_frsize
    if status.f_flag & os.ST_RDONLY:
        raise UsageError(f"--log-path {path}: its filesystem is mounted read-only")
    if status.f_blocks and free < FREE_BYTES:
        raise UsageError(f"--log-path {path}: the disk is full ({free / 1e6:.0f} MB free)")


# --- reward, engine, trainer -------------------------------------------------------------------------------------------------


def only_shows_runs() -> bool:
    """Whether scripts/setup_env.py made this environment to show runs, without what their programs need (scripts/requirements/light.txt).
    What it lacks says nothing of the nodes of a run."""
    return (Path(sys.prefix) / "only-shows-runs").exists()


def check_packages(settings: Settings, needs: Collection[str], environ: Environ) -> None:
    """What the run's programs import is installed here, and the user's own code can be loaded. `needs`: the program's."""
    check_trackers(settings.tracker.names)
    if "data" in needs:
        if "math" in reward_kinds(settings.reward.kind) and importlib.util.find_spec("math_verify") is None:
            raise UsageError("reward.kind=math: needs the package math-verify, which is not installed here")
        try_user_code(settings)
    if "model" in needs:
        check_deepspeed(settings, environ)
        check_optimizer(settings.optimizer.kind)


def check_reward(kinds: str) -> None:
    """Each reward is a known kind, or a function that its file defines."""
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
    """A judge that is asked has an address and a name, and the variable that holds its key is set on this node."""
    judge = settings.judge
    kind = next(filter(_asks_judge, reward_kinds(settings.reward.kind)), None)
    if kind is None:
        return
    if not judge.url or not judge.model:
        missing = "model" if judge.url else "url"
        raise UsageError(
            f"reward.kind={kind}: asks a judge; give judge.url and judge.model (judge.{missing} is not set)"
        )
    if not judge.url.startswith(("http://", "https://")):
        raise UsageError(f"judge.url={judge.url}: not an address like https://host/v1")
    if judge.api_key_env is not None and not environ.get(judge.api_key_env):
        raise UsageError(f"judge.api_key_env={judge.api_key_env}: this variable is not set here")


def check_agent(agent: str | None) -> None:
    """The agent's file defines it. Whether it is fit to be one shows when it is loaded (`try_user_code`)."""
    if agent is None:
        return
    if ":" not in agent:
        raise UsageError(f"rollout.agent={agent}: must be path/file.py:Class")
    _defining("rollout.agent", agent)


def try_user_code(settings: Settings) -> None:
    """Load the user's reward function and agent as rollouts will, in a process of their own, so that a failing import or a wrong
    signature is known before anything starts. Raises UsageError."""
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
            f"{' and '.join(named)}: loading this code took longer than {TRY_CODE_S:g} s; what does it do when it is imported?"
        ) from None
    if done.returncode != 0:
        # The last line is the error; what the user's own code printed stands before it.
        lines = done.stderr.strip().splitlines() or [f"its process ended with exit code {done.returncode}"]
        raise UsageError(lines[-1] if done.returncode == 2 else f"{' and '.join(named)}: {lines[-1]}")


def _defining(setting: str, value: str) -> ast.Module:
    """The file of `value` ("path/file.py:name"), parsed, which defines the name. Raises UsageError."""
    file, _, name = value.rpartition(":")
    try:
        tree = ast.parse(Path(file).read_bytes(), filename=file)
    except OSError as error:
        raise UsageError(f"{setting}={value}: {file} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{setting}={value}: {file}{line}: {getattr(error, 'msg', error)}") from None
    names = _defined(tree)
    if name not in names:
        raise UsageError(f"{setting}={value}: {file} defines no {name}{nearest(name, names)}")
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
    """What an update is to learn from is there, and was sampled as this run's settings say."""
    named = settings.update.trajectories
    if named is None:
        return
    from fsbarrier.rundir import runrecord
    from fsbarrier.rundir.paths import RunPaths

    path, said = Path(named), f"update.trajectories={named}"
    if not path.exists():
        raise UsageError(f"{said}: there is no such run directory or file")
    if path.is_dir():
        first = RunPaths(path).merged("train", 1)
        if not first.is_file():
            raise UsageError(f"{said}: has no merged train rollouts of iteration 1 ({first})")
        if runrecord.exists(path):
            sampled, own = runrecord.load(path).settings.rollout, settings.rollout
            for name in ("temperature", "top_p", "top_k"):
                theirs, ours = getattr(sampled, name), getattr(own, name)
                if theirs != ours:
                    wanted = f"rollout.{name}={theirs}"
                    raise UsageError(
                        f"{said}: was sampled with {wanted}, this run says {ours}; give {wanted}"
                    )


def check_engine(settings: Settings, environ: Environ) -> None:
    """This node has the accelerators that its servers need. A server that is there already has an address, and the variable that holds
    its key is set on this node."""
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
        raise UsageError(f"engine.api_key_env={engine.api_key_env}: this variable is not set here")


def check_command(name: str, command: str) -> None:
    """A command that a setting names can be split into words, and its program exists on this node."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{name}={command}: {error}") from None
    if not words or not (shutil.which(words[0]) or Path(words[0]).is_file()):
        raise UsageError(f"{name}={command}: {words[0] if words else 'nothing'!r} is not a program here")


def check_deepspeed(settings: Settings, environ: Environ) -> None:
    """DeepSpeed is here, if it is to train, and its configuration says nothing that the settings contradict."""
    from fsbarrier.host import accelerators
    from fsbarrier.settings import deepspeed_config

    trainer = settings.trainer
    if trainer.backend != "deepspeed" or trainer.command is not None:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "trainer.backend=deepspeed: needs the package deepspeed, which is not installed here; DS_BUILD_OPS=0 pip install "
            "--no-build-isolation deepspeed, beside torch"
        )
    given = deepspeed_config.read(trainer.deepspeed)
    dtype = trainer.dtype
    if dtype == "auto":
        dtype = "bfloat16" if accelerators.detect(environ) else "float32"
    deepspeed_config.filled(given, settings, dtype)


def check_optimizer(kind: str) -> None:
    """What the optimizer needs is here. Raises UsageError."""
    if kind == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise UsageError(
            f"optimizer.kind={kind}: needs the Python package torchao, which is not installed beside this fsbarrier ({sys.prefix}); "
            "install it on every node, or leave this out"
        )


def check_trainer(command: str | None) -> None:
    """A trainer command can be split into words, exists on this node, and has only known placeholders."""
    if command is None:
        return
    check_command("trainer.command", command)
    placeholders = re.findall(r"\{([A-Za-z_]+)\}", command)
    for name in placeholders:
        if name not in PLACEHOLDERS:
            hint = nearest(name, PLACEHOLDERS) or f"; there are {', '.join(PLACEHOLDERS)}"
            raise UsageError(f"trainer.command={command}: unknown placeholder {{{name}}}{hint}")
    if not {"out", "spec"}.intersection(placeholders):
        raise UsageError(
            f"trainer.command={command}: needs {{out}} (the folder to make) or {{spec}} (which names it)"
        )


def check_trackers(names: Sequence[str]) -> None:
    """Every node may come to lead, and then runs them. Raises UsageError: accelerate would leave out one without a word."""
    for name in names:
        for package in (("accelerate",), TRACKER_PACKAGES.get(name, (name,))):
            if not any(importlib.util.find_spec(one) for one in package):
                raise UsageError(
                    f"tracker.names={','.join(names)}: {name} needs the Python package {' or '.join(package)}, which is not installed "
                    f"beside this fsbarrier ({sys.prefix}); install it on every node, or drop {name}"
                )
