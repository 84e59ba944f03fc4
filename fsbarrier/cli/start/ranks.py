"""Determines this node's rank and the number of nodes from flags and from the launcher's environment variables.

The rank comes from, in this order: `--master`/`--worker`, NODE_RANK, RANK (unless it counts processes), SLURM_NODEID,
JOB_COMPLETION_INDEX, SKYPILOT_NODE_RANK, DSTACK_NODE_RANK, OMPI_COMM_WORLD_RANK (with one task per node).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
            f"{choice.source}={choice.value} contradicts {count.source}={count.value}: ranks start at 0, so the last one is "
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
    for launcher in LAUNCHERS:
        if _text(environ, launcher.rank) and launcher.applies(environ, num_nodes):
            return Choice(_number(environ, launcher.rank), launcher.rank)
    return None


def count_nodes(rank: Choice | None, environ: Environ) -> Choice | None:
    """The number of nodes according to the launcher that set the rank; None if unknown. Raises UsageError."""
    for name in COUNTS.get(rank.source, ()) if rank else ():
        if _text(environ, name):
            choice = Choice(_number(environ, name), name)
            if not 1 <= choice.value <= MAX_NODES:
                raise UsageError(f"{name} {choice.value}: must be between 1 and {MAX_NODES}")
            return choice
    return None


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
            f"{rank.source}={rank.value} sets this node's rank, but the number of nodes is unknown; give --num-nodes on every node"
            + (f", or --worker {rank.value}" if rank.value else "")
        )
    for launcher in LAUNCHERS if rank is None and not dry_run else ():
        several = [name for name in launcher.counts if _text(environ, name) not in ("", "0", "1")]
        if several:
            raise UsageError(
                f"{several[0]}={_text(environ, several[0])}: a launcher started several processes, but "
                f"{_why_unused(launcher.rank, environ)}; {HOW_TO_SAY}"
            )


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


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher's variables: the node rank, the number of nodes, and `applies`, which tells whether the first really is a node rank."""

    rank: str
    counts: tuple[str, ...] = ()
    applies: Callable[[Environ, int | None], bool] = lambda environ, num_nodes: True
    #: other variables that `applies` reads
    beside: tuple[str, ...] = ()


#: in order of precedence
LAUNCHERS = (
    Launcher("NODE_RANK", ("NNODES", "NUM_NODES")),
    Launcher("RANK", ("WORLD_SIZE",), _rank_counts_nodes, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    Launcher(
        "SLURM_NODEID", ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), _one_slurm_task_here, ("SLURM_LOCALID",)
    ),
    Launcher("JOB_COMPLETION_INDEX"),
    Launcher("SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",)),
    Launcher("DSTACK_NODE_RANK", ("DSTACK_NODES_NUM",)),
    Launcher(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        _one_mpi_task_a_node,
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
)
#: all launcher variables that describe which node a process is
VARIABLES = frozenset(
    name for launcher in LAUNCHERS for name in (launcher.rank, *launcher.counts, *launcher.beside)
)
#: source of the rank -> variables that may contain the number of nodes
COUNTS = {"--master": ("NNODES",), **{launcher.rank: launcher.counts for launcher in LAUNCHERS}}
