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


# --- rank ---------------------------------------------------------------------------------------------------


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
    sources: tuple[tuple[str, Callable[[Environ, int | None], bool]], ...] = (
        ("NODE_RANK", _always),
        ("RANK", _rank_counts_nodes),
        ("SLURM_NODEID", _one_slurm_task_here),
        ("JOB_COMPLETION_INDEX", _always),
        ("SKYPILOT_NODE_RANK", _always),
        ("DSTACK_NODE_RANK", _always),
        ("OMPI_COMM_WORLD_RANK", _one_mpi_task_a_node),
    )
    for name, applies in sources:
        if environ.get(name, "").strip() and applies(environ, num_nodes):
            return Choice(_number(environ, name), name)
    return None


def _always(environ: Environ, num_nodes: int | None) -> bool:
    return True


def _rank_counts_nodes(environ: Environ, num_nodes: int | None) -> bool:
    """Whether RANK can be a node's: with several processes a node it counts processes (torch's meaning)."""
    if environ.get("LOCAL_RANK", "0").strip() not in ("", "0"):
        return False
    if environ.get("LOCAL_WORLD_SIZE", "1").strip() not in ("", "1"):
        return False
    world_size = environ.get("WORLD_SIZE", "").strip()
    if not world_size:
        return True
    rank = environ["RANK"].strip()
    if not world_size.isdecimal() or not rank.isdecimal() or int(rank) >= int(world_size):
        return False
    return num_nodes is None or int(world_size) == num_nodes


def _one_slurm_task_here(environ: Environ, num_nodes: int | None) -> bool:
    local = environ.get("SLURM_LOCALID", "0").strip()
    if local not in ("", "0"):
        raise UsageError(
            f"SLURM_LOCALID {local}: another task is on this node; start one a node (srun --ntasks-per-node=1)"
        )
    return True


def _one_mpi_task_a_node(environ: Environ, num_nodes: int | None) -> bool:
    return environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "").strip() == "1"


def _number(environ: Environ, name: str) -> int:
    text = environ[name].strip()
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} {text!r}: not a whole number") from None


# --- number of nodes ----------------------------------------------------------------------------------------

_COUNTS = {
    "--master": ("NNODES",),
    "NODE_RANK": ("NNODES", "NUM_NODES"),
    "RANK": ("WORLD_SIZE",),
    "SLURM_NODEID": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    "SKYPILOT_NODE_RANK": ("SKYPILOT_NUM_NODES",),
    "DSTACK_NODE_RANK": ("DSTACK_NODES_NUM",),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE",),
}


def count_nodes(rank: Choice | None, environ: Environ) -> Choice | None:
    """How many nodes the launcher that named the rank started; None where it does not say. Raises UsageError."""
    for name in _COUNTS.get(rank.source, ()) if rank else ():
        if environ.get(name, "").strip():
            choice = Choice(_number(environ, name), name)
            if not 1 <= choice.value <= MAX_NODES:
                raise UsageError(f"{name} {choice.value}: must be from 1 to {MAX_NODES}")
            return choice
    return None
