"""Determines this node's rank and the number of nodes from flags and from the launcher's environment variables.

`--master` and `--worker` take precedence; otherwise the rank comes from the first of LAUNCHERS whose variable is set and counts nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.errors import UsageError

Environ = Mapping[str, str]
HOW_TO_SAY = "give --master (node 0) or --worker R, or set NODE_RANK"
MAX_NODES = 1_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """A number and its source: a flag or an environment variable."""

    value: int
    source: str


def node_rank(
    *, master: bool, worker: int | None, environ: Environ, num_nodes: int | None = None
) -> Choice | None:
    """This node's rank; None if unknown. `num_nodes`, if known, is the limit and shows whether RANK counts nodes.

    Raises UsageError naming the flag or variable for an invalid rank.
    """
    choice = _from_flags(master, worker) or _from_environ(environ, num_nodes)
    if choice is None:
        return None
    if choice.value < 0:
        raise UsageError(f"{choice.source} {choice.value}: a node rank must be 0 or more")
    count = count_nodes(choice, environ) if num_nodes is None else None
    if count is not None and choice.value >= count.value:
        raise UsageError(
            f"{said(choice, environ)} contradicts {said(count, environ)}: ranks start at 0, so the last one is "
            f"{count.value - 1}; to override {count.source} give --num-nodes"
        )
    if num_nodes is not None and choice.value >= num_nodes:
        nodes = f"{num_nodes} nodes, ranks 0 to {num_nodes - 1}" if num_nodes > 1 else "one node, rank 0"
        raise UsageError(f"{choice.source} {choice.value}: out of range, this run has {nodes}")
    return choice


def _from_flags(master: bool, worker: int | None) -> Choice | None:
    if master and worker is not None:
        raise UsageError(f"--master and --worker {worker}: contradict each other; drop one of the two")
    if master:
        return Choice(0, "--master")
    return None if worker is None else Choice(worker, "--worker")


def _from_environ(environ: Environ, num_nodes: int | None) -> Choice | None:
    ranks_given = [
        (Choice(launcher.number(environ, launcher.rank), launcher.rank), launcher)
        for launcher in LAUNCHERS
        if _text(environ, launcher.rank)
        and launcher.applies(environ, num_nodes)
        and not launcher.why_not(environ)
    ]
    for choice, launcher in ranks_given[1:]:
        first, first_launcher = ranks_given[0]
        if choice.value != first.value and (launcher.firm or first_launcher.firm):
            raise UsageError(
                f"{said(first, environ)} and {said(choice, environ)}: contradict each other about this node's rank; unset one of the two, "
                "or give --master or --worker R"
            )
    if ranks_given and num_nodes is None:
        firm = [launcher for _, launcher in ranks_given if launcher.firm]
        _check_same_count(ranks_given[0][0], firm, environ)
    return ranks_given[0][0] if ranks_given else None


def _check_same_count(rank: Choice, firm: Iterable[Launcher], environ: Environ) -> None:
    """Raises UsageError if a launcher that always counts nodes says another number than the one that is used."""
    count = count_nodes(rank, environ)
    if count is None:
        return
    for launcher in firm:
        for other in _counts(launcher, environ):
            if other.value != count.value:
                raise UsageError(
                    f"{said(count, environ)} and {said(other, environ)}: contradict each other about the number of nodes; unset one of the "
                    "two, or give --num-nodes"
                )


def said(choice: Choice, environ: Environ) -> str:
    """NAME=VALUE as the environment has it, for messages."""
    return f"{choice.source}={_text(environ, choice.source) or choice.value}"


def count_nodes(rank: Choice | None, environ: Environ) -> Choice | None:
    """The number of nodes according to the launcher that set the rank; None if unknown. Raises UsageError."""
    if rank is not None and rank.source == "--master":
        return next(_counts(Launcher("--master", ("NNODES",)), environ), None)
    of = (launcher for launcher in LAUNCHERS if rank is not None and launcher.rank == rank.source)
    return next((choice for launcher in of for choice in _counts(launcher, environ)), None)


def _counts(launcher: Launcher, environ: Environ) -> Iterator[Choice]:
    """The numbers of nodes that a launcher's variables say. Raises UsageError."""
    for name in _set_counts(launcher, environ):
        text = _text(environ, name)
        if re.fullmatch(r"\d+:\d+", text):
            raise UsageError(f"{name}={text}: a range of nodes; give --num-nodes {text} on every node")
        number = launcher.count(environ, name)
        if number is None:
            continue
        if not 1 <= number <= MAX_NODES:
            raise UsageError(f"{name} {number}: must be between 1 and {MAX_NODES}")
        yield Choice(number, name)


def which_node(num_nodes: int, environ: Environ) -> str:
    """The error message for an unknown rank."""
    unused = f" ({_why_unused('RANK', environ)})" if _text(environ, "RANK") else ""
    return f"the rank of this node is unknown, and the run has {num_nodes} nodes; {HOW_TO_SAY}{unused}"


def check_count(rank: Choice | None, environ: Environ, *, dry_run: bool) -> None:
    """Raises UsageError if a launcher started this process, and nothing gives the number of nodes of a new run.

    Otherwise each process could start a run of one node, which would look like success.
    """
    if rank is not None and rank.source in environ:
        raise UsageError(
            f"{said(rank, environ)} sets this node's rank, but the number of nodes is unknown; give --num-nodes on every node"
            + (f", or --worker {rank.value}" if rank.value else "")
        )
    for launcher in LAUNCHERS if rank is None and not dry_run else ():
        if _text(environ, launcher.rank) and launcher.why_not(environ):
            raise UsageError(f"{launcher.why_not(environ)}; {HOW_TO_SAY}")
        several = [name for name in _set_counts(launcher, environ) if _several(launcher, environ, name)]
        if several:
            raise UsageError(
                f"{several[0]}={_text(environ, several[0])}: a launcher started several processes, but "
                f"{_why_unused(launcher.rank, environ)}; {HOW_TO_SAY}"
            )


def _set_counts(launcher: Launcher, environ: Environ) -> list[str]:
    """The variables with a launcher's number of nodes that are set."""
    return [name for pattern in launcher.counts for name in _set_and_like(pattern, environ)]


def _set_and_like(pattern: str, environ: Environ) -> list[str]:
    return sorted(name for name in environ if re.fullmatch(pattern, name) and _text(environ, name))


def _several(launcher: Launcher, environ: Environ, name: str) -> bool:
    try:
        return (launcher.count(environ, name) or 0) > 1
    except UsageError:
        # The variable is no plain number. Some launchers write a range of numbers, which means several nodes.
        return True


def without_launchers(environ: Environ) -> dict[str, str]:
    """The environment for nodes that this process starts itself: they must not take their rank from what describes this process."""
    own = without_torchruns(environ)
    return {name: value for name, value in own.items() if not re.fullmatch(VARIABLES, name)}


def without_torchruns(environ: Environ) -> dict[str, str]:
    """Without the variables of an outer torchrun (PET_...): a run's own torchrun would take from them what its command does not say."""
    return {name: value for name, value in environ.items() if not name.startswith("PET_")}


def alone_in_a_job(rank: Choice | None, count: int | None, environ: Environ) -> str:
    """What to say if a job of several nodes runs this command only once, in its script; "" otherwise."""
    for launcher in LAUNCHERS if rank is not None and count is not None and count > 1 else ():
        if rank is not None and launcher.rank == rank.source and launcher.in_script(environ):
            return f"{said(rank, environ)} of {count} nodes, but not started by {launcher.starts}: start the other nodes too"
    return ""


def _why_unused(name: str, environ: Environ) -> str:
    text = _text(environ, name)
    return f"{name}={text} counts processes here, not nodes" if text else f"{name} is not set"


def _text(environ: Environ, name: str) -> str:
    return environ.get(name, "").strip()


def _number(environ: Environ, name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} {text!r}: must be a whole number") from None


# --- launchers ----------------------------------------------------------------------------------------------


def _rank_counts_nodes(environ: Environ, num_nodes: int | None) -> bool:
    """Whether RANK can be a node rank. With several processes per node it is a process rank, as in torch."""
    if _text(environ, "LOCAL_RANK") not in ("", "0"):
        return False
    if _text(environ, "LOCAL_WORLD_SIZE") not in ("", "1"):
        return False
    world_size = _text(environ, "WORLD_SIZE")
    if not world_size:
        return True
    if _text(environ, "PET_NNODES") not in ("", world_size):
        return False
    rank = _text(environ, "RANK")
    if not world_size.isdecimal() or not rank.isdecimal() or int(rank) >= int(world_size):
        return False
    return num_nodes is None or int(world_size) == num_nodes


def _one_slurm_task_here(environ: Environ, num_nodes: int | None) -> bool:
    local = _text(environ, "SLURM_LOCALID")
    if local not in ("", "0"):
        raise UsageError(
            f"SLURM_LOCALID {local}: several tasks run on this node; start one per node (srun --ntasks-per-node=1)"
        )
    return True


def _one_mpi_task_a_node(environ: Environ, num_nodes: int | None) -> bool:
    return _text(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


def _one_hydra_task_a_node(environ: Environ, num_nodes: int | None) -> bool:
    return _text(environ, "MPI_LOCALNRANKS") == "1"


def _volcanos_tasks(environ: Environ) -> str:
    """Why a pod's index in its task cannot be its rank, namely if the job has several tasks; "" if it has one."""
    names = _set_and_like(VOLCANOS_COUNT, environ)
    if len(names) < 2:
        return ""
    counts = " and ".join(f"{name}={_text(environ, name)}" for name in names)
    return f"{counts}: this job has several tasks, and VC_TASK_INDEX={_text(environ, 'VC_TASK_INDEX')} counts in one of them only"


def _sagemakers_hosts(environ: Environ) -> list[str]:
    try:
        hosts = json.loads(_text(environ, "SM_HOSTS"))
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or _text(environ, "SM_CURRENT_HOST") not in hosts:
        raise UsageError(
            f"SM_HOSTS={_text(environ, 'SM_HOSTS')}: does not name SM_CURRENT_HOST={_text(environ, 'SM_CURRENT_HOST')}; {HOW_TO_SAY}"
        )
    return sorted(map(str, hosts))


def _count_of_pbs(environ: Environ, name: str) -> int | None:
    if name == "PBS_NUM_NODES":
        return _number(environ, name)
    try:
        return len({*Path(_text(environ, name)).read_text(encoding="utf-8").split()}) or None
    except (OSError, ValueError):
        # With some versions only the job's first node has this file.
        return None


#: how many pods a task has, with the task's name in the middle
VOLCANOS_COUNT = r"VC_\w+_NUM"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher's variables: the node rank, the number of nodes (as patterns), and `applies`: whether the first really is a node rank."""

    rank: str
    counts: tuple[str, ...] = ()
    applies: Callable[[Environ, int | None], bool] = lambda environ, num_nodes: True
    #: other variables that `applies` reads
    beside: tuple[str, ...] = ()
    #: It counts nodes whatever else is set, so another variable must not contradict it.
    firm: bool = False
    #: the rank; and the number of nodes by the variable with this name, or None if it does not say it. Raise UsageError.
    number: Callable[[Environ, str], int] = _number
    count: Callable[[Environ, str], int | None] = _number
    #: why its variable is no rank although it is set, in words; "" if it is one
    why_not: Callable[[Environ], str] = lambda environ: ""
    #: Whether the command runs in the job's script, which runs on the first node only; what starts it on each node.
    in_script: Callable[[Environ], bool] = lambda environ: False
    starts: str = ""


#: in order of precedence
LAUNCHERS = (
    Launcher("NODE_RANK", ("NNODES", "NUM_NODES")),
    Launcher("PET_NODE_RANK", ("PET_NNODES",), firm=True),
    Launcher("LWS_WORKER_INDEX", ("LWS_GROUP_SIZE",), firm=True),
    Launcher(
        "SM_CURRENT_HOST",
        ("SM_HOSTS",),
        firm=True,
        number=lambda environ, name: _sagemakers_hosts(environ).index(_text(environ, name)),
        count=lambda environ, name: len(_sagemakers_hosts(environ)),
    ),
    Launcher("RANK", ("WORLD_SIZE",), _rank_counts_nodes, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    Launcher(
        "SLURM_NODEID",
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        _one_slurm_task_here,
        ("SLURM_LOCALID",),
        # A step has an id; the job's script belongs to none.
        in_script=lambda environ: (
            bool(_text(environ, "SLURM_JOB_ID")) and not _text(environ, "SLURM_STEP_ID")
        ),
        starts="srun --ntasks-per-node=1",
    ),
    Launcher("JOB_COMPLETION_INDEX"),
    Launcher(
        "VC_TASK_INDEX",
        (VOLCANOS_COUNT,),
        firm=True,
        why_not=_volcanos_tasks,
    ),
    Launcher("SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",)),
    Launcher("DSTACK_NODE_RANK", ("DSTACK_NODES_NUM",)),
    Launcher(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        _one_mpi_task_a_node,
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # MPICH and Intel MPI.
    Launcher("PMI_RANK", ("PMI_SIZE",), _one_hydra_task_a_node, ("MPI_LOCALNRANKS",)),
    # LSF counts the tasks of blaunch from 1.
    Launcher(
        "LSF_PM_TASKID",
        ("LSB_MCPU_HOSTS",),
        number=lambda environ, name: _number(environ, name) - 1,
        # HOST SLOTS HOST SLOTS ...
        count=lambda environ, name: len({*_text(environ, name).split()[::2]}),
    ),
    Launcher(
        "PBS_NODENUM",
        ("PBS_NUM_NODES", "PBS_NODEFILE"),
        count=_count_of_pbs,
        in_script=lambda environ: _text(environ, "PBS_TASKNUM") in ("", "1"),
        starts="pbsdsh",
    ),
)
#: a pattern of all launcher variables that describe which node a process is
VARIABLES = "|".join(
    name for launcher in LAUNCHERS for name in (launcher.rank, *launcher.counts, *launcher.beside)
)
