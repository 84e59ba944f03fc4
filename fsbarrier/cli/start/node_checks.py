"""What a node checks before it starts, on the first start of a run and on every later one: `CHECKS`.

Each check raises UsageError with one line that names the flag or setting. The checks write no files and import no user code into this
process. model_folder.py checks the model, task_files.py the tasks.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from fsbarrier.doctor import machine
from fsbarrier.engine import accelerators
from fsbarrier.engine.answer_format import known_parsers
from fsbarrier.errors import UsageError
from fsbarrier.processes import guard
from fsbarrier.processes.supervisor import own_program, with_this_package
from fsbarrier.program import Program
from fsbarrier.settings.checks import shown
from fsbarrier.settings.losses import LOSSES
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.sources import nearest
from fsbarrier.settings.value_types import reward_kinds
from fsbarrier.wording import counted

Environ = Mapping[str, str]
# Timeout for importing the user's code: a large library on a slow filesystem takes minutes.
TRY_CODE_S = 600.0
#: rewards that need neither the user's code nor a judge
PLAIN_REWARDS = frozenset({"exact", "numeric", "math", "verl"})
PLACEHOLDERS = (
    *("node_rank", "num_nodes", "master_addr", "master_port"),
    *("batch", "out", "model", "trainer_state", "spec"),
)
#: trackers whose Python package has another name; one of these packages is needed
TRACKER_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}
#: begins what an error says about packages that only the wheel's extras install: "a run's engines need vllm"
RL = "a run's "
#: settings that a program uses only if it needs a model or data (`Program.needs`)
USED_WITH = {
    "model": ("has no model", ("init_from", "trainer.command", "engine.url")),
    "data": ("does not read tasks", ("rollout.agent",)),
}
#: user ids of people; lower ones are the system's, and higher ones include `nobody`
PEOPLE = range(1000, 65_000)
PROBE_S = 30.0
NO_LOGIN = ("nologin", "false", "sync")


def check_node(settings: Settings, program: Program, environ: Environ, *, dry_run: bool) -> None:
    """Check whether this node can do its part of the run. Raises UsageError."""
    _check_slice(settings, program)
    _check_fixed(settings, program)
    if not dry_run:
        _check_accelerators(settings)
    for needed, check in CHECKS:
        if needed is None or needed in program.needs:
            check(settings, environ)
    if not (dry_run and only_shows_runs()):
        _check_packages(settings, program.needs)
        if "data" in program.needs:
            try_user_code(settings)


def check_used(typed: Settings, program: Program) -> None:
    """Raises UsageError for a setting that the program would silently ignore."""
    given = typed.flat()
    if typed.engines and "model" not in program.needs:
        raise UsageError(f"engines.{min(typed.engines)}: program {program.name} has no model; drop it")
    for need, (without_it, names) in USED_WITH.items():
        for name in names if need not in program.needs else ():
            if (value := given[name]) is not None:
                raise UsageError(f"{name}={value}: program {program.name} {without_it}; drop it")


def only_shows_runs() -> bool:
    """Whether this is the light environment for dry runs (scripts/requirements/light.txt). Packages missing from it may be installed on
    the nodes of a run."""
    return (Path(sys.prefix) / "only-shows-runs").exists()


def _check_slice(settings: Settings, program: Program) -> None:
    """The program has the requested slice of phases."""
    chosen = settings.rl_phase
    if chosen != "both" and all(part.name != chosen for part in program.slices):
        raise UsageError(f"--rl-phase {chosen}: not supported by program {program.name}; drop it")


def _check_fixed(settings: Settings, program: Program) -> None:
    """The settings that the program does not leave to the user have its values."""
    for name, needed in program.fixed.items():
        if (value := attrgetter(name)(settings)) != needed:
            raise UsageError(
                f"{name}={shown(value)}: program {program.name} needs {name}={shown(needed)}; drop it"
            )


def _check_accelerators(settings: Settings) -> None:
    """`--expect-gpus`, as far as this node can check it. With several nodes the leader counts all accelerators (run/admission.py)."""
    expected = settings.expect_gpus
    if expected is None:
        return
    count, needed_here = len(accelerators.detect()), expected if settings.num_nodes == 1 else min(expected, 1)
    if count < needed_here:
        raise UsageError(f"--expect-gpus {expected}: this node has {counted(count, 'accelerator')}")


def exposed(settings: Settings, program: Program) -> str:
    """One line that says what other users of this host could do in this run, and why; "" if nothing, or if there are none."""
    if not others_may_be_here():
        return ""
    why, trainer = private_network_problem(), settings.trainer
    engines = [*([settings.engine] if settings.manages_engine else []), *settings.engines.values()]
    parallel = any(engine.private_network and engine.tensor_parallel_size > 1 for engine in engines)
    trains = settings.rl_phase != "rollout" and "model" in program.needs and not trainer.command
    cases = (
        ("run code in this run: its engines", "engine", parallel, settings.engine.nodes > 1),
        ("falsify its updates: they", "trainer", trains and trainer.private_network, settings.num_nodes > 1),
    )
    return "; ".join(
        f"other users of this host can {what} {'span nodes' if spans else f'get no network of their own ({why})'} "
        f"({part}.private_network=false says that you trust these users)"
        for what, part, concerns, spans in cases
        if concerns and (spans or why)
    )


def unconfined(settings: Settings) -> str:
    """One line if programs of answers run here without a sandbox; else ""."""
    # Imported late, since most starts have no such reward.
    from fsbarrier.rewards import code_sandbox

    if "code" not in reward_kinds(settings.reward.kind) or not (why := code_sandbox.missing()):
        return ""
    return (
        f"reward.kind=code: the answers' programs have limits of time, memory and output, no network and no processes, but no sandbox, so "
        f"that they can read and write what you can: {why}"
    )


# --- the checks -------------------------------------------------------------------------------------------------------------


def _engine(settings: Settings, environ: Environ) -> None:
    """This node has the accelerators that its servers need. If the user runs a server: its URL is valid, and its key's variable is set."""
    from fsbarrier.engine.answer_format import format_of
    from fsbarrier.engine.client import normal_url
    from fsbarrier.engine.placement import check_arguments, placements

    engine, rollout = settings.engine, settings.rollout
    _check_parser("rollout.tool_parser", rollout.tool_parser, "tool_parsers")
    _check_parser("rollout.reasoning_parser", rollout.reasoning_parser, "reasoning")
    if rollout.max_thinking_tokens is not None and format_of(None, rollout.reasoning_parser) is None:
        raise UsageError(
            f"rollout.max_thinking_tokens={rollout.max_thinking_tokens}: the marks of rollout.reasoning_parser="
            f"{rollout.reasoning_parser} are not known, so thoughts cannot be closed; drop one of the two"
        )
    for name, own in settings.engines.items():
        check_arguments(own, f"engines.{name}")
    if settings.manages_engine:
        check_arguments(engine)
        placements(engine, accelerators.detect(environ), environ, sorted(os.sched_getaffinity(0)))
    if engine.url is not None:
        normal_url(engine.url)
    if engine.api_key_env is not None and not environ.get(engine.api_key_env):
        raise UsageError(
            f"engine.api_key_env={engine.api_key_env}: this variable is not set on this node; export it"
        )


def _check_parser(setting: str, value: str | None, package: str) -> None:
    """vLLM has a parser of this name, as far as vLLM is installed here."""
    known = known_parsers(package) if value is not None else []
    if value is not None and known and value not in known:
        hint = nearest(value, known) or f"; known are {', '.join(known)}"
        raise UsageError(f"{setting}={value}: vLLM has no such parser{hint}")


def _folders(settings: Settings, environ: Environ) -> None:
    """This node can read the folders of the models beside the policy."""
    named = {f"engines.{name}.model": own.model for name, own in settings.engines.items()}
    for name, folder in {**named, "critic.model": settings.critic.model}.items():
        if folder is not None and not (Path(folder) / "config.json").is_file():
            raise UsageError(f"{name}={folder}: no such model folder on this node")


def _commands(settings: Settings, environ: Environ) -> None:
    """The programs of the user's commands exist on this node, and the trainer's has only known placeholders."""
    if settings.notify.command is not None:
        _check_command("notify.command", settings.notify.command)
    for name, environment in settings.all_environments.items():
        _check_command(settings.environment_key(name, "command"), str(environment.command))
    command = settings.trainer.command
    if command is None:
        return
    _check_command("trainer.command", command)
    placeholders = re.findall(r"\{([A-Za-z_]+)\}", command)
    for name in placeholders:
        if name not in PLACEHOLDERS:
            hint = nearest(name, PLACEHOLDERS) or f"; available: {', '.join(PLACEHOLDERS)}"
            raise UsageError(f"trainer.command={command}: unknown placeholder {{{name}}}{hint}")
    if not {"out", "spec"}.intersection(placeholders):
        raise UsageError(
            f"trainer.command={command}: needs {{out}} (the output folder) or {{spec}} (a file that contains its path)"
        )


def _check_command(name: str, command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{name}={command}: {error}") from None
    if not words or not (shutil.which(words[0]) or Path(words[0]).is_file()):
        missing = f"program {words[0]!r} not found on this node" if words else "must not be empty"
        raise UsageError(f"{name}={command}: {missing}")


Check = Callable[[Settings, Environ], None]
#: what a program must need for a check to matter (None: any program), and the check
CHECKS: tuple[tuple[str | None, Check], ...] = (
    ("model", _engine),
    ("model", _folders),
    (None, _commands),
)


# --- packages, and the user's code --------------------------------------------------------------------------------------------


def _check_packages(settings: Settings, needs: Collection[str]) -> None:
    """Packages are checked on every node: any may become leader and run the trackers, which accelerate would silently skip."""
    for setting, alternatives in _packages(settings, needs):
        if not any(importlib.util.find_spec(package) for package in alternatives):
            if setting.startswith(RL):
                kind = "cuda" if accelerators.detect() else "cpu"
                raise UsageError(
                    f"the Python package {alternatives[0]}, for {setting}, is not installed in {sys.prefix}: in a clone ./run.sh "
                    f"creates the environment, elsewhere type {sys.executable} -m pip install 'fsbarrier[rl,{kind}]', on every node"
                )
            raise UsageError(
                f"{setting}: needs the Python package {' or '.join(alternatives)}, which is not installed in {sys.prefix}; type "
                f"{sys.executable} -m pip install {alternatives[0]}, on every node"
            )
    unfit = machine.unfit_builds() if "model" in needs else []
    if unfit:
        raise UsageError("; ".join(f"{finding}: {advice}" for finding, advice in unfit) + ", on every node")


def _packages(settings: Settings, needs: Collection[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each setting that needs a package, and the names of packages of which one must be installed."""
    for tracker in settings.tracker.names:
        yield f"tracker.names={tracker}", ("accelerate",)
        yield f"tracker.names={tracker}", TRACKER_PACKAGES.get(tracker, (tracker,))
    for kind in {"math", "verl"} & {*reward_kinds(settings.reward.kind)} if "data" in needs else ():
        yield f"reward.kind={kind}", ("math_verify",)
    if settings.manages_engine and "model" in needs and settings.rl_phase != "update":
        yield f"{RL}engines", ("vllm",)
    rollout, trainer = settings.rollout, settings.trainer
    if rollout.named_renderer and "data" in needs and settings.rl_phase != "update":
        yield f"rollout.renderer={rollout.renderer}", ("renderers",)
    trains = "model" in needs and trainer.command is None and settings.rl_phase != "rollout"
    for package in ("torch", "transformers") if trains else ():
        yield f"{RL}training", (package,)
    if "merge" in needs:
        yield f"{RL}trajectory files", ("torch",)
    if trains and trainer.backend == "deepspeed":
        yield "trainer.backend=deepspeed", ("deepspeed",)
    if trains and trainer.attention == "flash_attention_2":
        yield "trainer.attention=flash_attention_2", ("flash_attn",)
    if trains and settings.lora.rank:
        yield f"lora.rank={settings.lora.rank}", ("peft",)


def try_user_code(settings: Settings) -> None:
    """Open the rewards, the agent and the loss in a separate process, as the run will: so a failing import, a wrong signature or a judge
    without an address is found before anything starts. Raises UsageError."""
    named = {
        "reward.kind": set(reward_kinds(settings.reward.kind)) - PLAIN_REWARDS,
        "rollout.agent": settings.rollout.agent,
        "algorithm.loss": {settings.algorithm.loss} - {*LOSSES},
    }
    chosen = " and ".join(f"{name}={settings.flat()[name]}" for name, value in named.items() if value)
    if not chosen:
        return
    try:
        done = subprocess.run(
            own_program("fsbarrier.workers.try_user_code"),
            env=with_this_package(os.environ),
            # Through a pipe: command lines are visible to other users.
            input=settings.encoded().decode(),
            capture_output=True,
            text=True,
            timeout=TRY_CODE_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{chosen}: importing this code took longer than {TRY_CODE_S:g} s; move slow work out of the module's top level"
        ) from None
    if done.returncode != 0:
        # The last line is the error. Output of the user's code comes before it.
        lines = done.stderr.strip().splitlines()
        last = lines[-1] if lines else f"its process ended with exit code {done.returncode}"
        raise UsageError(last if done.returncode == 2 else f"{chosen}: {last}")


def private_network_problem() -> str:
    """Why this host does not allow private networks for programs; "" if it does.

    A private network is a network namespace with only a loopback. It needs no root if user namespaces are allowed. guard.py makes it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", guard.__file__, guard.PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.splitlines() or ["it failed"])[-1]


def others_may_be_here() -> bool:
    """Whether people other than this user have an account on this host, or a process: in a container, or on a node of one's own, nobody
    does."""
    own = {os.geteuid(), os.getuid()}
    accounts = {account.pw_uid for account in pwd.getpwall() if not account.pw_shell.endswith(NO_LOGIN)}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal():
                accounts.add(entry.stat().st_uid)
    return any(uid in PEOPLE for uid in accounts - own)
