"""From what a person typed to a run that can begin: settings, rank, record. Used by `run` and `launch`; pydantic enters here.

Node 0 resolves and checks everything, then makes run.json. Every other start, of any node, takes the record and
may only repeat what it says. Up to there nothing has been started and, if anything was wrong, nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.doctor.findings import Report
from fsbarrier.errors import UsageError
from fsbarrier.loader import load_program
from fsbarrier.program import Program
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings import resolve
from fsbarrier.settings.sources import Given
from fsbarrier.start import demo_folder, demo_tasks, filesystem, preflight, ranks

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What was typed for one start of one node. `given`: weakest source first. `defaults`: below all of them."""

    given: tuple[Given, ...]
    environ: Mapping[str, str]
    master: bool = False
    worker: int | None = None
    resume: bool = False
    dry_run: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """A node that can begin. `until`: the last iteration asked for; `created`: this start made the run's record;
    `mount`: what this node found out about the run's filesystem."""

    record: RunRecord
    node_rank: int
    until: int | None
    created: bool
    mount: Report


def begin(request: Request, say: Say = lambda line: None) -> Start:
    """Decide which node this is and give it the run's record, made or found. `say` is told what takes long.

    Raises UsageError for everything that is wrong, TooFewNodes where node 0 does not come.
    """
    given = {item.key: item for item in preflight.with_absolute_paths(request.given)}
    said = resolve.resolve(given.values(), cross_checks=False).settings
    log_path = Path(said.log_path) if said.log_path else preflight.default_log_path(request.environ)
    preflight.check_log_path(log_path)
    mount = filesystem.admit(log_path, write=not request.dry_run)
    known = said.num_nodes if "num_nodes" in given else None
    rank = ranks.node_rank(
        master=request.master, worker=request.worker, environ=request.environ, num_nodes=known
    )
    there = runrecord.exists(log_path)
    if request.resume and not there:
        raise UsageError(f"--resume: no run in {log_path} to go on with (no run.json); drop it to begin one")
    if there:
        return _join(request, given, runrecord.load(log_path), mount)
    if rank is None or rank.value == 0 or request.dry_run:
        return _create(request, given, log_path, rank, mount, say)
    patience_s = said.coordination.join_timeout_s
    return _join(request, given, runrecord.wait(log_path, patience_s, on_wait=say), mount)


# --- node 0, first start ------------------------------------------------------------------------------------------------


def _create(
    request: Request,
    given: dict[str, Given],
    log_path: Path,
    rank: ranks.Choice | None,
    mount: Report,
    say: Say,
) -> Start:
    count = ranks.count_nodes(rank, request.environ) if "num_nodes" not in given else None
    if count is not None:
        given = {"num_nodes": Given("num_nodes", count.value, count.source), **given}
    program = _program(request, given)
    defaults, is_demo = _defaults(request, given, program)
    # What the run will have: found below, or for the built-in task made last, when all the rest is right.
    fixed = {"log_path": str(log_path)}
    if is_demo:
        folder = RunPaths(log_path).demo
        fixed |= {"data_path": str(folder), "model": str(folder / "model")}
    resolved = resolve.resolve(given.values(), {**filesystem.limits(mount, given), **defaults, **fixed})
    if rank is None and resolved.settings.num_nodes > 1 and not request.dry_run:
        raise UsageError(_no_rank(resolved.settings.num_nodes, request.environ))
    nested = dict(resolved.nested)
    _check_own(nested, program, request.environ)
    tasks, model = _inputs(nested, program, request.environ, is_demo)
    nested["model"] = model
    record = runrecord.new(log_path, nested, resolve.digest(nested), tasks=tasks, model=model)
    if request.dry_run:
        return Start(record, 0, nested["iterations"], created=False, mount=mount)
    files.set_shared_group(nested["shared_group"])
    if is_demo:
        demo_folder.make(RunPaths(log_path).demo, preflight.cache_folder(request.environ), say)
        made = preflight.read_tasks(Path(nested["data_path"]), tuple(tasks), nested["reward"]["kind"])
        record = runrecord.new(log_path, nested, resolve.digest(nested), tasks=made, model=model)
    published = runrecord.publish(record)
    if published.run_id != record.run_id:  # another process was first
        return _join(request, given, published, mount)
    return Start(record, 0, nested["iterations"], created=True, mount=mount)


def _program(request: Request, given: Mapping[str, Given]) -> Program:
    chosen = given["program"].value if "program" in given else request.defaults.get("program", "rl")
    return load_program(chosen)


def _defaults(
    request: Request, given: Mapping[str, Given], program: Program
) -> tuple[Mapping[str, Any], bool]:
    """What lies below the given values; with neither data nor a model that is the built-in task's settings."""
    has_data, has_model = (key in given and given[key].value is not None for key in ("data_path", "model"))
    needs_data = "data" in program.needs and _value(given, "rl_phase", "both") != "update"
    needs_model = "model" in program.needs
    if has_data or has_model or not (needs_data or needs_model):
        if needs_data and not has_data:
            raise UsageError("--model without --data-path: give both, or neither for the built-in task")
        if needs_model and not has_model:
            raise UsageError("--data-path without --model: give both, or neither for the built-in task")
        return request.defaults, False
    task = {key: value for key, value in demo_tasks.DEMO_SETTINGS.items() if key != "iterations"}
    return {**task, **request.defaults}, True


def _value(given: Mapping[str, Given], key: str, default: Any) -> Any:
    return given[key].value if key in given else default


def _no_rank(num_nodes: int, environ: Mapping[str, str]) -> str:
    unused = f" (RANK={environ['RANK']} counts processes here, not nodes)" if environ.get("RANK") else ""
    return f"which of the {num_nodes} nodes is this? give --master (node 0) or --worker R, or set NODE_RANK{unused}"


def _check_own(nested: Mapping[str, Any], program: Program, environ: Mapping[str, str]) -> None:
    """What belongs to the user beside data and model."""
    if "data" in program.needs:
        preflight.check_reward(nested["reward"]["kind"])
        preflight.check_judge(nested, environ)
        preflight.check_agent(nested["rollout"]["agent"])
    if "model" in program.needs:
        preflight.check_engine(nested, environ)
        preflight.check_replay(nested)
    preflight.check_trainer(nested["trainer"]["command"])


def _inputs(
    nested: Mapping[str, Any], program: Program, environ: Mapping[str, str], is_demo: bool
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """The task files and the model folder, checked; those of the built-in task are yet to be made."""
    splits = preflight.needed_splits(nested) if "data" in program.needs else ()
    if is_demo:
        folder = Path(nested["data_path"])
        counts = {"train": demo_tasks.TRAIN_TASKS, "test": demo_tasks.TEST_TASKS}
        tasks = {
            split: {"path": str(folder / f"{split}.jsonl"), "count": counts[split], "sha256": ""}
            for split in splits
        }
        return tasks, nested["model"]
    data_path = Path(nested["data_path"]) if nested["data_path"] else None
    tasks = (
        preflight.read_tasks(data_path, splits, nested["reward"]["kind"])
        if data_path is not None and splits
        else {}
    )
    model = str(preflight.find_model(nested["model"], data_path, environ)) if nested["model"] else None
    return tasks, model


# --- every other start --------------------------------------------------------------------------------------------------


def _join(request: Request, given: Mapping[str, Given], record: RunRecord, mount: Report) -> Start:
    """A node of a run that has its record."""
    num_nodes = int(record.settings["num_nodes"])
    stated = _comparable(given, record, request.environ)
    resolved = resolve.resolve(stated.values(), resolve.as_defaults(record.settings), cross_checks=False)
    runrecord.check_contradictions(record, stated, resolved.nested)
    rank = ranks.node_rank(
        master=request.master, worker=request.worker, environ=request.environ, num_nodes=num_nodes
    )
    if rank is None and num_nodes > 1 and not request.dry_run:
        raise UsageError(_no_rank(num_nodes, request.environ))
    stored = resolve.from_nested(record.settings).model_dump(
        mode="json"
    )  # what an older version did not know: defaults
    if "model" in load_program(record.settings["program"]).needs:
        preflight.check_engine(stored, request.environ)  # variables, and where files lie, are each node's own
        preflight.check_judge(stored, request.environ)
        preflight.check_agent(stored["rollout"]["agent"])
    runrecord.check_tasks(record)
    record = replace(record, settings={**stored, **_choices(given, resolved.nested)})
    return Start(record, rank.value if rank else 0, resolved.settings.iterations, created=False, mount=mount)


def _choices(given: Mapping[str, Given], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What this start chooses anew. Raises UsageError for a split of something that is not rolled out."""
    chosen = {key: resolved[key] for key in runrecord.CHOICES}
    if "rl_phase" in given and "rollout_split" not in given:
        chosen["rollout_split"] = None
    if chosen["rollout_split"] is not None and chosen["rl_phase"] != "rollout":
        raise UsageError(f"--rollout-split {chosen['rollout_split']}: only with --rl-phase rollout")
    return chosen


def _comparable(
    given: Mapping[str, Given], record: RunRecord, environ: Mapping[str, str]
) -> dict[str, Given]:
    """The given values, a model's name turned into its folder as the record has it."""
    stated = dict(given)
    item = stated.get("model")
    if item is not None and isinstance(item.value, str) and item.value != record.model:
        data_path = record.settings["data_path"]
        folder = preflight.find_model(item.value, Path(data_path) if data_path else None, environ)
        stated["model"] = Given("model", str(folder), item.source)
    return stated
