"""What is checked before anything starts: run directory, model, task files, reward, trainer command.

Each check raises UsageError with one line that names the flag, setting, file or line. Nothing is written, nothing imported
that belongs to the user.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier import files
from fsbarrier.errors import UsageError
from fsbarrier.rundir.runrecord import TaskSource
from fsbarrier.settings.sources import ChosenValue, nearest

if TYPE_CHECKING:
    from fsbarrier.settings.sections import EngineSettings, Settings

Environ = Mapping[str, str]
FREE_BYTES = 16 * 1024 * 1024
REWARDS = ("exact", "numeric", "math", "judge")
PLACEHOLDERS = (
    *("node_rank", "num_nodes", "master_addr", "master_port"),
    *("batch", "out", "model", "trainer_state", "spec"),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


# --- where things are ---------------------------------------------------------------------------------------------------


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
            if item.key in ("data_path", "log_path", "update.trajectories") or (
                item.key == "program" and value.endswith(".py")
            ):
                value = str(absolute(value))
            elif item.key in ("reward.kind", "rollout.agent") and ":" in value:
                file, _, name = value.rpartition(":")
                value = f"{absolute(file)}:{name}"
        result.append(ChosenValue(item.key, value, item.source))
    return result


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
        status = os.statvfs(there)
    except OSError as error:
        raise UsageError(f"--log-path {path}: {there}: {error.strerror}") from None
    free = status.f_bavail * status.f_frsize
    if status.f_flag & os.ST_RDONLY:
        raise UsageError(f"--log-path {path}: its filesystem is mounted read-only")
    if status.f_blocks and free < FREE_BYTES:
        raise UsageError(f"--log-path {path}: the disk is full ({free / 1e6:.0f} MB free)")


# --- model --------------------------------------------------------------------------------------------------------------


def find_model(name: str, data_path: Path | None, environ: Environ) -> Path:
    """The folder of a Hugging Face model: a path, a folder below the data path, or a name in a local Hugging Face cache."""
    candidates = [absolute(name)]
    if data_path is not None:
        candidates.append(data_path / name)
    for candidate in candidates:
        if candidate.is_dir():
            _check_model(name, candidate)
            return candidate
        if candidate.is_file():
            raise UsageError(f"--model {name}: {candidate} is a file; give the folder with config.json")
    for cache in _caches(data_path, environ):
        snapshot = _cached(cache, name)
        if snapshot is not None:
            _check_model(name, snapshot)
            return snapshot
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise UsageError(
        f"--model {name}: no such folder (looked at {looked}, and in the local Hugging Face cache); nothing is "
        "downloaded: give a folder with config.json, weights and tokenizer"
    )


def _caches(data_path: Path | None, environ: Environ) -> list[Path]:
    home = absolute(environ.get("HF_HOME") or "~/.cache/huggingface")
    hub = environ.get("HF_HUB_CACHE")
    return [absolute(hub) if hub else home / "hub", *([data_path, data_path / "hub"] if data_path else [])]


def _cached(cache: Path, name: str) -> Path | None:
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if revision and snapshot.is_dir() else None


def _check_model(name: str, folder: Path) -> None:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise UsageError(f"--model {name}: {folder} {what}; give a Hugging Face model folder")

    config_file = folder / "config.json"
    require(config_file.is_file(), "has no config.json")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name}: {config_file} cannot be read: {error}") from None
    require(isinstance(config, dict) and "model_type" in config, "has a config.json without a model_type")
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    require(bool(weights), "has no weights (*.safetensors)")
    require(any((folder / file).is_file() for file in _TOKENIZERS), "has no tokenizer")


# --- data ---------------------------------------------------------------------------------------------------------------


def needed_splits(settings: Settings) -> tuple[str, ...]:
    """Which task files the phases of a run read."""
    if settings.rl_phase == "update":
        return ()
    return {"train-only": ("train",), "eval-only": ("test",)}.get(
        settings.rollout_split or "", ("train", "test")
    )


def read_tasks(data_path: Path, splits: Collection[str], reward: str) -> dict[str, TaskSource]:
    """Split -> {"path", "count", "sha256"}; every line is checked, its answer for what `reward` can judge by.

    Raises UsageError naming file and line number.
    """
    if not data_path.is_dir():
        raise UsageError(
            f"--data-path {data_path}: {'not a folder' if data_path.exists() else 'no such folder'}"
        )
    # Not at the top: this can load a parquet library, which commands without tasks need not wait for.
    from fsbarrier.data import tasks
    from fsbarrier.rewards.kinds import check_answers

    found: dict[str, TaskSource] = {}
    for split in splits:
        path = _task_file(data_path, split)
        read = tasks.read_tasks(path)
        if read.count == 0:
            raise UsageError(f"{path}: has no task")
        check_answers(reward, read.tasks.values(), path)
        found[split] = {"path": str(path), "count": read.count, "sha256": files.sha256_file(path)}
    return found


def _task_file(data_path: Path, split: str) -> Path:
    there = [
        path for path in (data_path / f"{split}.jsonl", data_path / f"{split}.parquet") if path.is_file()
    ]
    if len(there) == 2:
        raise UsageError(f"--data-path {data_path}: has both {there[0].name} and {there[1].name}; keep one")
    if not there:
        raise UsageError(f"--data-path {data_path}: has no {split}.jsonl or {split}.parquet")
    if not os.access(there[0], os.R_OK):
        raise UsageError(f"{there[0]}: not readable for you")
    return there[0]


# --- reward, engine, trainer -------------------------------------------------------------------------------------------------


def check_reward(kind: str) -> None:
    """The reward is a known kind, or a function that its file defines."""
    if ":" not in kind:
        if kind not in REWARDS:
            raise UsageError(
                f"reward.kind={kind}: must be {', '.join(REWARDS)} or path/file.py:function{nearest(kind, REWARDS)}"
            )
        if kind == "math" and importlib.util.find_spec("math_verify") is None:
            raise UsageError("reward.kind=math: needs the package math-verify, which is not installed here")
        return
    _defining("reward.kind", kind)


def check_judge(settings: Settings, environ: Environ) -> None:
    """A judge that is asked has an address and a name, and the variable that holds its key is set on this node."""
    kind, judge = settings.reward.kind, settings.judge
    name, asked = kind.rpartition(":")[2], kind == "judge"
    if ":" in kind:
        for node in _defining("reward.kind", kind).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                asked = "judge" in {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    if not asked:
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
    """The agent is a class that its file defines, with a method `run` that is async."""
    if agent is None:
        return
    said, name = f"rollout.agent={agent}", agent.rpartition(":")[2]
    if ":" not in agent:
        raise UsageError(f"{said}: must be path/file.py:Class")
    for node in _defining("rollout.agent", agent).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            raise UsageError(f"{said}: {name} is a function, not a class")
        if isinstance(node, ast.ClassDef) and node.name == name:
            runs = [
                n
                for n in node.body
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == "run"
            ]
            if not runs and not node.bases:
                raise UsageError(
                    f"{said}: has no method run; an agent has `async def run(self, task, client)`"
                )
            if runs and isinstance(runs[-1], ast.FunctionDef):
                raise UsageError(
                    f"{said}: its method run is not async; an agent has `async def run(self, task, client)`"
                )


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


def check_engine(engine: EngineSettings, environ: Environ) -> None:
    """A server that is there already has an address, and the variable that holds its key is set on this node."""
    from fsbarrier.engine.client import normal_url

    if engine.url is not None:
        normal_url(engine.url)
    if engine.api_key_env is not None and not environ.get(engine.api_key_env):
        raise UsageError(f"engine.api_key_env={engine.api_key_env}: this variable is not set here")


def check_trainer(command: str | None) -> None:
    """A trainer command can be split into words, exists on this node, and has only known placeholders."""
    if command is None:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"trainer.command={command}: {error}") from None
    if not words or not (shutil.which(words[0]) or Path(words[0]).is_file()):
        raise UsageError(
            f"trainer.command={command}: {words[0] if words else 'nothing'!r} is not a program here"
        )
    placeholders = re.findall(r"\{([A-Za-z_]+)\}", command)
    for name in placeholders:
        if name not in PLACEHOLDERS:
            hint = nearest(name, PLACEHOLDERS) or f"; there are {', '.join(PLACEHOLDERS)}"
            raise UsageError(f"trainer.command={command}: unknown placeholder {{{name}}}{hint}")
    if not {"out", "spec"}.intersection(placeholders):
        raise UsageError(
            f"trainer.command={command}: needs {{out}} (the folder to make) or {{spec}} (which names it)"
        )
