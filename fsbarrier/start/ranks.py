"""Which node this is, and how many there are: from flags and from what launchers put into the environment.

The rank comes from, in order: `--master`/`--worker`, NODE_RANK, RANK where nothing says that it counts
processes, SLURM_NODEID, JOB_COMPLETION_INDEX, SKYPILOT_NODE_RANK, DSTACK_NODE_RANK, OMPI_COMM_WORLD_RANK with one
task a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsbarrier.errors import UsageError

Environ = Mapping[str, str]
MAX_NODES = 1_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """A number and who said it: a flag or an environment variable."""

    value: int
    source: str


def node_rank(
    *, master: bool, worker: int | None, environ: Environ, num_nodes: int | None = None
) -> Choice | None:
    """This node's rank; None where nobody says. `num_nodes`, where known, is the limit and settles what RANK counts.

    Raises UsageError naming the flag or variable for a rank that cannot be.
    """
    choice = _from_flags(master, worker) or _from_environ(environ, num_nodes)
    if choice is None:
        return None
    if choice.value < 0:
        raise UsageError(f"{choice.source} {choice.value}: a node rank is 0 or more")
    if num_nodes is not None and choice.value >= num_nodes:
        nodes = f"{num_nodes} nodes, ranks 0 to {num_nodes - 1}" if num_nodes > 1 else "one node, rank 0"
        raise UsageError(f"{choice.source} {choice.value}: out of range, this run has {nodes}")
    return choice


def _from_flags(master: bool, worker: int | None) -> Choice | None:
    if master and worker is not None:
        raise UsageError(f"--master and --worker {worker}: a node is one or the other")
    if master:
        return Choice(0, "--master")
    return None if worker is None else Choice(worker, "--worker")


def _from_environ(environ: Environ, num_nodes: int | None) -> Choice | None:
    for launcher in LAUNCHERS:
        if _text(environ, launcher.rank) and launcher.applies(environ, num_nodes):
            return Choice(_number(environ, launcher.rank), launcher.rank)
    return None


def count_nodes(rank: Choice | None, environ: Environ) -> Choice | None:
    """How many nodes the launcher that named the rank started; None where it does not say. Raises UsageError."""
    for name in COUNTS.get(rank.source, ()) if rank else ():
        if _text(environ, name):
            choice = Choice(_number(environ, name), name)
            if not 1 <= choice.value <= MAX_NODES:
                raise UsageError(f"{name} {choice.value}: must be from 1 to {MAX_NODES}")
            return choice
    return None


def _text(environ: Environ, name: str) -> str:
    return environ.get(name, "").strip()


def _number(environ: Environ, name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} {text!r}: not a whole number") from None


# --- launchers ----------------------------------------------------------------------------------------------


def _rank_counts_nodes(environ: Environ, num_nodes: int | None) -> bool:
    """Whether RANK can be a node's: with several processes a node it counts processes (torch's meaning)."""
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
            f"SLURM_LOCALID {local}: another task is on this node; start one a node (srun --ntasks-per-node=1)"
        )
    return True


def _one_mpi_task_a_node(environ: Environ, num_nodes: int | None) -> bool:
    return _text(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variable with a node's rank, those with the number of nodes, and whether the first one is a node's rank at all."""

    rank: str
    counts: tuple[str, ...] = ()
    applies: Callable[[Environ, int | None], bool] = lambda environ, num_nodes: True


#: in this order: the first that gives a rank counts
LAUNCHERS = (
    Launcher("NODE_RANK", ("NNODES", "NUM_NODES")),
    Launcher("RANK", ("WORLD_SIZE",), _rank_counts_nodes),
    Launcher("SLURM_NODEID", ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), _one_slurm_task_here),
    Launcher("JOB_COMPLETION_INDEX"),
    Launcher("SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",)),
    Launcher("DSTACK_NODE_RANK", ("DSTACK_NODES_NUM",)),
    Launcher("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), _one_mpi_task_a_node),
)
#: variables of launchers that start several nodes and do not say how many
NEED_A_COUNT = ("NODE_RANK", "JOB_COMPLETION_INDEX")
#: the variable that gave the rank -> those that may give the number of nodes
COUNTS = {"--master": ("NNODES",), **{launcher.rank: launcher.counts for launcher in LAUNCHERS}}
