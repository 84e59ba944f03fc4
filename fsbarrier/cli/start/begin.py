"""Turns the user's input into a run that can begin: settings, rank, record. Used by `run` and `launch`.

On the first start, node 0 validates everything and creates run.json. All later starts load that record. A start may give different values
only for settings that may change, and only node 0 changes them (docs/protocol.md, "Settings that change"). Nothing is started before all
checks have passed, and a failed check leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsbarrier.cli.start import hub, model_folder, policy_export, preflight, ranks, task_files
from fsbarrier.cli.start.node_checks import check_node, check_used, exposed, unconfined
from fsbarrier.cli.start.policy_export import VersionToExport
from fsbarrier.data import demo_tasks
from fsbarrier.doctor import examine, machine
from fsbarrier.doctor.findings import WARNING
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.loader import load_program
from fsbarrier.program import Program
from fsbarrier.protocol.assign import iterations_of_a_pass
from fsbarrier.protocol.membership import JOIN_TIMEOUT_S
from fsbarrier.protocol.situation import MASTER
from fsbarrier.rollouts.sharing import training_sets
from fsbarrier.rundir import runrecord, session_settings
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord, TaskSource
from fsbarrier.rundir.session_settings import in_force, newest_settings
from fsbarrier.settings.checks import check, check_change
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.store import files, trusted_folder
from fsbarrier.store.retry import fails, patiently
from fsbarrier.wording import printable, setting_text

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """The user's input for one start of one node. `chosen`: lowest precedence first; `defaults` are below all of them."""

    chosen: tuple[ChosenValue, ...]
    environ: Mapping[str, str]
    master: bool = False
    worker: int | None = None
    #: take any free rank; `Start.node_rank` is then meaningless
    any_rank: bool = False
    resume: bool = False
    dry_run: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """A node that is ready to begin.

    `settings`: the run's settings including the changes of this start; `stated`: the changeable settings given on the command line, by
    dotted name. `until`: the last iteration requested. `created`: whether this start created the run's record.
    """

    record: RunRecord
    settings: Settings
    program: Program
    node_rank: int
    until: int | None
    created: bool
    stated: Mapping[str, object] = field(default_factory=dict)


def begin(request: Request, say: Say = lambda line: None) -> Start:
    """Determine this node's rank, and create or load the run's record. `say` receives progress messages.

    Raises UsageError for invalid input, TooFewNodes if node 0 does not create the record in time.
    """
    chosen = {item.key: item for item in preflight.with_absolute_paths(request.chosen)}
    # Reject a mistyped value before waiting for another node or reading any file.
    typed = resolve(chosen.values(), cross_checks=False)
    # Also reject a value that the run's record cannot hold.
    typed.encoded()
    log_path = Path(typed.log_path) if typed.log_path else preflight.default_log_path(request.environ)
    preflight.check_log_path(log_path)
    asked = _Asked(request, chosen, typed, log_path, say)
    asked.check_trusted()
    typed, chosen = hub.with_downloads(typed, chosen, request.environ, say, dry_run=request.dry_run)
    asked = replace(asked, typed=typed, chosen=chosen)
    if (count := _launchers_count(request, chosen, there=runrecord.exists(log_path))) is not None:
        chosen["num_nodes"] = ChosenValue("num_nodes", count.value, count.source)
        asked = replace(asked, typed=replace(typed, num_nodes=count.value))
    _admit(log_path, write=not request.dry_run)
    for noticed in [] if request.dry_run else machine.quick(examine.existing(log_path)):
        if noticed.level == WARNING:
            say(f"{noticed.name}: {noticed.with_advice}")
    known = asked.typed.num_nodes if "num_nodes" in chosen else None
    rank = _rank(request, known)
    if hint := ranks.alone_in_a_job(rank, asked.typed.num_nodes, request.environ):
        say(hint)
    record = _find_record(asked, rank)
    start = _create(asked, rank) if record is None else _join(asked, record, rank)
    # These warnings come after all checks, because a refused start prints nothing but its error.
    for line in filter(None, (exposed(start.settings, start.program), unconfined(start.settings))):
        say(line)
    return start


def _admit(log_path: Path, *, write: bool) -> None:
    """A short `fsbarrier doctor`: a quick check of the filesystem under `log_path`, which need not exist yet. `write`: include write tests.

    Raises StoreError if the filesystem fails or is unsuitable, UsageError without write permission.
    """
    try:
        report = patiently(lambda: examine.short(log_path, write=write))
    except OSError as error:
        if fails(error):
            raise StoreError(f"--log-path {log_path}: {error.strerror}") from None
        raise UsageError(f"--log-path {log_path}: not writable: {error.strerror or error}") from None
    if report.refused:
        why = report.refused[0].with_advice
        raise StoreError(
            f"--log-path {log_path}: its filesystem cannot support a run: {why} (details: fsbarrier doctor)"
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The request of a start before the run's record is known. `chosen`: the user's choices by dotted name; `typed`: those choices and
    defaults as Settings."""

    request: Request
    chosen: Mapping[str, ChosenValue]
    typed: Settings
    log_path: Path
    say: Say

    def check_trusted(self) -> None:
        """Raises UsageError if somebody else could decide what is in the run directory."""
        trusts_group = "shared_group" in self.chosen and self.typed.shared_group
        trusted_folder.check(
            self.log_path,
            shared_group=trusts_group,
            trust_mount="trust_mount" in self.chosen and self.typed.trust_mount,
            named="--log-path",
            inside=runrecord.STEERING,
        )

    def check_rank(self, rank: ranks.Choice | None, num_nodes: int) -> None:
        """Raises UsageError if the run has several nodes and this node's rank is unknown."""
        if rank is None and num_nodes > 1 and not self.request.dry_run and not self.request.any_rank:
            raise UsageError(ranks.which_node(num_nodes, self.request.environ))


def _rank(request: Request, num_nodes: int | None) -> ranks.Choice | None:
    if request.any_rank:
        return None
    return ranks.node_rank(
        master=request.master, worker=request.worker, environ=request.environ, num_nodes=num_nodes
    )


def _launchers_count(
    request: Request, chosen: Mapping[str, ChosenValue], *, there: bool
) -> ranks.Choice | None:
    """The number of nodes by the launcher that sets this node's rank, unless the user gives one. So a launcher that starts a run again with
    more or fewer nodes needs no flag. WORLD_SIZE is ignored if the run exists, because it may count processes."""
    rank = None if "num_nodes" in chosen else _rank(request, None)
    count = ranks.count_nodes(rank, request.environ)
    return None if count is not None and count.source == "WORLD_SIZE" and there else count


def _find_record(asked: _Asked, rank: ranks.Choice | None) -> RunRecord | None:
    """The run's record; None if this start must create it. Raises UsageError, TooFewNodes."""
    request, log_path = asked.request, asked.log_path
    if runrecord.exists(log_path):
        return runrecord.load(log_path)
    if request.resume:
        raise UsageError(
            f"--resume: {log_path} contains no run (no run.json); drop --resume to start a new one"
        )
    if "num_nodes" not in asked.chosen and not request.any_rank:
        ranks.check_count(rank, request.environ, dry_run=request.dry_run)
    # With --rank auto, a node that knows the number of nodes creates the record.
    waits = "num_nodes" not in asked.chosen if request.any_rank else rank is not None and rank.value > 0
    if waits and request.worker is not None and request.dry_run and "num_nodes" not in asked.chosen:
        raise UsageError(
            f"--worker {request.worker}: {log_path} contains no run yet, so the worker's settings are unknown; "
            "start node 0 first, or give --num-nodes to show a new run"
        )
    if not waits or request.dry_run:
        return None
    return runrecord.wait(log_path, JOIN_TIMEOUT_S, on_wait=asked.say)


# --- node 0, first start ------------------------------------------------------------------------------------------------


def _create(asked: _Asked, rank: ranks.Choice | None) -> Start:
    request, typed, log_path = asked.request, asked.typed, asked.log_path
    if strangers := runrecord.without_record(log_path):
        some = printable(", ".join(strangers[:5])) + (
            f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        )
        raise UsageError(
            f"--log-path {log_path}: contains {some} but no run.json, so it is not the directory of a run; use a new or empty "
            "folder, or restore run.json if this run lost it"
        )
    chosen = asked.chosen
    program = load_program(typed.program)
    check_used(typed, program)
    defaults, is_demo = _defaults(request, typed, program)
    demo = RunPaths(log_path).demo
    fixed = {"log_path": str(log_path)}
    if is_demo:
        fixed |= {"data_path": str(demo), "model": str(demo / "model")}
    policy = _policy_to_begin_with(typed, program)
    if policy is not None:
        fixed |= {"model": str(policy.model)}
    below = {**program.defaults, **defaults, **program.fixed, **fixed}
    settings = resolve(chosen.values(), below)
    settings = model_folder.with_engines_folders(settings, settings.data_path, request.environ)
    asked.check_rank(rank, settings.num_nodes)
    check_node(settings, program, request.environ, dry_run=request.dry_run)
    tasks, model = _inputs(settings, program, asked, demo_tasks.FOLDER if is_demo else None)
    settings = replace(settings, iterations=_last_iteration(settings, tasks, asked))
    if is_demo:
        # The run gets a copy of the demo's files, which `demo_tasks.make` writes below.
        model = settings.model
        tasks = {name: {**task, "path": str(demo / Path(task["path"]).name)} for name, task in tasks.items()}
    if not request.dry_run:
        # Determines the permissions of everything written from here on.
        files.set_shared_group(settings.shared_group)
    if policy is not None and not request.dry_run:
        first_policy = RunPaths(log_path).first_policy
        model = str(policy_export.copy_other_runs(str(settings.init_from), policy, first_policy))
    settings = replace(settings, model=model)
    record = runrecord.new(log_path, settings, tasks=tasks, model=model)
    if request.dry_run:
        return Start(record, settings, program, 0, settings.iterations, created=False)
    if is_demo:
        # Create the record last, so that a failed start leaves nothing behind.
        demo_tasks.make(demo)
    published = runrecord.publish(record)
    if published.run_id != record.run_id:
        # Another process created the record first.
        return _join(asked, published, rank)
    asked.check_trusted()
    return Start(record, settings, program, 0, settings.iterations, created=True)


def _last_iteration(settings: Settings, tasks: Mapping[str, TaskSource], asked: _Asked) -> int | None:
    """After which iteration this start ends the run: as --iterations or --epochs says, else as recorded. Raises UsageError."""
    typed, chosen = asked.typed, asked.chosen
    if typed.epochs is None:
        return typed.iterations if "iterations" in chosen else settings.iterations
    said = chosen["epochs"].written(str(typed.epochs))
    if "iterations" in chosen:
        raise UsageError(f"{said}: {chosen['iterations'].source} also says when to stop; drop one of the two")
    sets = training_sets(settings, tasks)
    if len(sets) != 1 or settings.train.reward_weights:
        why = f"there are {len(sets)} training sets"
        if len(sets) == 1:
            why = "train.reward_weights draws tasks by their rewards"
        raise UsageError(f"{said}: there are no passes over the tasks, because {why}; give --iterations")
    return typed.epochs * iterations_of_a_pass(len(sets[0].tasks), settings.rollout.tasks)


def _policy_to_begin_with(typed: Settings, program: Program) -> VersionToExport | None:
    """The policy of another run selected by `init_from`. Raises UsageError."""
    if typed.init_from is None:
        return None
    if typed.model is not None:
        raise UsageError(
            f"init_from={typed.init_from}: contradicts --model, which also sets the initial policy; drop one of the two"
        )
    return policy_export.find_other_runs(typed.init_from)


def _defaults(request: Request, typed: Settings, program: Program) -> tuple[Mapping[str, object], bool]:
    """The defaults of this request, and whether it uses the built-in task, i.e. has neither data nor a model."""
    has_data = typed.data_path is not None
    has_model = typed.model is not None or typed.init_from is not None
    needs_data = program.reads_data and typed.rl_phase != "update"
    needs_model = "model" in program.needs
    if has_data or has_model or not (needs_data or needs_model):
        if needs_data and not has_data:
            named = f"init_from={typed.init_from}" if typed.model is None else "--model"
            raise UsageError(f"{named} without --data-path: give both, or neither for the built-in task")
        if needs_model and not has_model:
            raise UsageError("--data-path without --model: give both, or neither for the built-in task")
        return request.defaults, False
    task = {key: value for key, value in demo_tasks.DEMO_SETTINGS.items() if key != "iterations"}
    return {**task, **request.defaults}, True


def _inputs(
    settings: Settings, program: Program, asked: _Asked, built_in: Path | None
) -> tuple[dict[str, TaskSource], str | None]:
    """The validated task files and model folder: the user's, or those in the folder `built_in`."""
    named = task_files.needed_files(settings) if program.reads_data else {}
    data_path = built_in or (Path(settings.data_path) if settings.data_path else None)
    model_named = str(built_in / "model") if built_in else settings.model
    if data_path and named:
        # Check this first, because the model may be inside it.
        task_files.check_folder(data_path)
    environ = asked.request.environ
    model = model_folder.find_model(model_named, data_path, environ) if model_named else None
    blind = ""
    if model is not None:
        model_folder.check_trainable(model, settings)
        model_folder.check_lengths(model, settings)
        blind = model_folder.try_model(model, settings, asked.say)
        model_folder.check_engines(settings, model)
        model_folder.try_renderer(model, settings, program.needs)
    tasks: dict[str, TaskSource] = {}
    if data_path and named and "examples" in program.needs:
        tasks = task_files.read_examples(data_path, named, settings, model=model)
    elif data_path and named:
        tasks = task_files.read_tasks(data_path, named, settings, model=model, blind=blind, say=asked.say)
    if model is not None and "data" in program.needs and not asked.request.dry_run:
        model_folder.say_how_answers_are_read(model, settings, asked.say)
    return tasks, str(model) if model else None


# --- all other starts ---------------------------------------------------------------------------------------------------


def _join(asked: _Asked, record: RunRecord, rank: ranks.Choice | None) -> Start:
    """Start a node of an existing run. Its rank may be beyond the run's number of nodes: node 0 may be about to ask for more."""
    request, chosen, typed = asked.request, asked.chosen, asked.typed
    # Somebody else may have made the directory since it was looked at.
    asked.check_trusted()
    settings = in_force(record.settings, newest_settings(record.paths))
    files.set_shared_group(settings.shared_group)
    with_folder = _with_models_folder(typed, record, settings.data_path, request.environ)
    stated = session_settings.stated_changes(record, chosen, with_folder)
    if rank is not None and rank.source == "RANK":
        rank = _rank(request, typed.num_nodes if "num_nodes" in chosen else settings.num_nodes)
    if rank is None or rank.value == MASTER:
        # With --rank auto, this node may become node 0.
        settings, stated = _changed(settings, stated, asked)
    asked.check_rank(rank, settings.num_nodes)
    program = load_program(settings.program)
    until = _last_iteration(settings, record.tasks, asked)
    settings = _with_choices(asked, settings)
    # Environment variables, packages and the places of files may differ between nodes.
    check_node(settings, program, request.environ, dry_run=request.dry_run)
    runrecord.check_tasks(record)
    if program.reads_data:
        task_files.check_recorded(settings, record.tasks)
    number = rank.value if rank else 0
    return Start(record, settings, program, number, until, created=False, stated=stated)


def _changed(
    settings: Settings, stated: dict[str, object], asked: _Asked
) -> tuple[Settings, dict[str, object]]:
    """The run's settings with the changes of this start of node 0, and all settings it states. Raises UsageError."""
    even = len(set(settings.rank_weights)) == 1
    if "num_nodes" in stated and "rank_weights" not in stated and even:
        # Equal weights are the default and follow the number of nodes.
        stated = {**stated, "rank_weights": [settings.rank_weights[0]] * int(str(stated["num_nodes"]))}
    changed = settings.with_values(stated)
    before = settings.flat()
    differing = {name: value for name, value in stated.items() if before[name] != value}
    if differing:
        check(changed, asked.chosen)
        check_change(changed, differing)
    for name, value in differing.items():
        was, becomes = (
            setting_text(each) if each not in ("", [], ()) else "nothing" for each in (before[name], value)
        )
        asked.say(printable(f"{name} changes from {was} to {becomes} if this start begins a session"))
    return changed, stated


def _with_choices(asked: _Asked, recorded: Settings) -> Settings:
    """The run's settings with this start's own choices. Raises UsageError for a rollout split without a rollout."""
    chosen, typed = asked.chosen, asked.typed
    rl_phase, split = recorded.rl_phase, recorded.rollout_split
    if "rl_phase" in chosen:
        rl_phase, split = typed.rl_phase, None
    if "rollout_split" in chosen:
        split = typed.rollout_split
    if split is not None and rl_phase != "rollout":
        raise UsageError(f"--rollout-split {split}: requires --rl-phase rollout")
    expected = typed.expect_gpus if "expect_gpus" in chosen else recorded.expect_gpus
    return replace(recorded, rl_phase=rl_phase, rollout_split=split, expect_gpus=expected)


def _with_models_folder(
    typed: Settings, record: RunRecord, data_path: str | None, environ: Mapping[str, str]
) -> Settings:
    """The user's settings, with the names of models resolved to their folders as in the record."""
    typed = model_folder.with_engines_folders(typed, data_path, environ)
    if typed.model is None or typed.model == record.model:
        return typed
    folder = model_folder.find_model(typed.model, Path(data_path) if data_path else None, environ)
    return replace(typed, model=str(folder))
