"""Ranks, numbers of nodes and addresses, from every launcher's variables."""

from __future__ import annotations

import pytest

from fsbarrier.cli.start import ranks
from fsbarrier.errors import UsageError
from fsbarrier.processes import addresses


def rank(
    environ: dict[str, str], *, master: bool = False, worker: int | None = None, num_nodes: int | None = None
) -> tuple[int, str] | None:
    choice = ranks.node_rank(master=master, worker=worker, environ=environ, num_nodes=num_nodes)
    return None if choice is None else (choice.value, choice.source)


def test_the_order_of_the_variables() -> None:
    order = [
        ("NODE_RANK", {"NODE_RANK": "1"}),
        ("RANK", {"RANK": "2"}),
        ("SLURM_NODEID", {"SLURM_NODEID": "3"}),
        ("JOB_COMPLETION_INDEX", {"JOB_COMPLETION_INDEX": "4"}),
        ("SKYPILOT_NODE_RANK", {"SKYPILOT_NODE_RANK": "5"}),
        ("DSTACK_NODE_RANK", {"DSTACK_NODE_RANK": "6"}),
        ("OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
    ]
    environ: dict[str, str] = {}
    for name, variables in reversed(order):
        environ |= variables
        assert rank(environ) == (int(variables[name]), name)


@pytest.mark.parametrize(
    ("environ", "num_nodes", "used"),
    [
        ({"RANK": "1"}, None, True),
        ({"RANK": "1", "WORLD_SIZE": "3"}, None, True),
        ({"RANK": "1", "WORLD_SIZE": "3"}, 3, True),
        ({"RANK": "1", "WORLD_SIZE": "24"}, 3, False),  # processes: 8 a node
        ({"RANK": "3", "WORLD_SIZE": "3"}, None, False),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}, None, False),
        ({"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, None, False),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None, True),
        ({"RANK": "1", "WORLD_SIZE": "many"}, None, False),
    ],
)
def test_rank_counts_only_where_no_world_size_contradicts_it(
    environ: dict[str, str], num_nodes: int | None, used: bool
) -> None:
    assert rank(environ, num_nodes=num_nodes) == ((int(environ["RANK"]), "RANK") if used else None)
    elsewhere = rank({**environ, "SLURM_NODEID": "2"}, num_nodes=num_nodes)
    assert elsewhere is not None and elsewhere[1] == ("RANK" if used else "SLURM_NODEID")


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        ({}, {"master": True, "worker": 1}, "--master and --worker 1"),
        ({}, {"worker": 3, "num_nodes": 3}, "--worker 3: out of range, this run has 3 nodes, ranks 0 to 2"),
        ({"NODE_RANK": "1"}, {"num_nodes": 1}, "NODE_RANK 1: out of range, this run has one node"),
        ({"NODE_RANK": "-1"}, {}, "NODE_RANK -1: a node rank must be 0 or more"),
        ({"NODE_RANK": "first"}, {}, "NODE_RANK 'first': must be a whole number"),
        ({"SLURM_NODEID": "0x"}, {}, "SLURM_NODEID '0x': must be a whole number"),
        ({"SLURM_NODEID": "1", "SLURM_LOCALID": "3"}, {}, "SLURM_LOCALID 3"),
        (
            {"NODE_RANK": "2", "NNODES": "2"},
            {},
            "NODE_RANK=2 contradicts NNODES=2: ranks start at 0, so the last one is 1",
        ),
        ({"DSTACK_NODE_RANK": "5", "DSTACK_NODES_NUM": "4"}, {}, "contradicts DSTACK_NODES_NUM=4"),
    ],
)
def test_an_impossible_rank_is_refused_with_its_source(
    environ: dict[str, str], flags: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        rank(environ, **flags)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_number_of_nodes_that_is_typed_wins_over_the_launcher_s() -> None:
    assert rank({"NODE_RANK": "2", "NNODES": "2"}, num_nodes=4) == (2, "NODE_RANK")
    assert rank({"NODE_RANK": "1", "NNODES": "2"}) == (1, "NODE_RANK")


def test_the_number_of_nodes_comes_from_the_same_launcher() -> None:
    everything = {"SLURM_NNODES": "4", "WORLD_SIZE": "5", "NNODES": "6", "SKYPILOT_NUM_NODES": "7"}

    def count(source: str, environ: dict[str, str]) -> int | None:
        choice = ranks.count_nodes(ranks.Choice(0, source), environ)
        return None if choice is None else choice.value

    assert count("SLURM_NODEID", everything) == 4
    assert count("RANK", everything) == 5
    assert count("NODE_RANK", everything) == count("--master", everything) == 6
    assert count("SKYPILOT_NODE_RANK", everything) == 7
    assert count("JOB_COMPLETION_INDEX", everything) is count("--worker", everything) is None
    assert ranks.count_nodes(None, everything) is None
    assert count("SLURM_NODEID", {"SLURM_NNODES": "9", "SLURM_STEP_NUM_NODES": "2"}) == 2
    with pytest.raises(UsageError, match="NNODES 0"):
        count("NODE_RANK", {"NNODES": "0"})
    with pytest.raises(UsageError, match="WORLD_SIZE 'x'"):
        count("RANK", {"WORLD_SIZE": "x"})


@pytest.mark.parametrize(
    ("host", "interface", "kind"),
    [
        ("192.0.2.5", "eth0", "default"),
        ("10.0.0.5", "ib0", "other"),
        ("2001:db8::5", "eth0", "other"),
        ("172.17.0.1", "docker0", "bridge"),
        ("10.42.0.0", "flannel.1", "bridge"),
        ("169.254.3.4", "eth1", "link-local"),
        ("fe80::1%eth0", "eth0", "link-local"),
        ("127.0.1.1", "lo", "loopback"),
        ("::1", "lo", "loopback"),
    ],
)
def test_kinds_of_addresses(host: str, interface: str, kind: str) -> None:
    assert addresses.kind_of(host, interface, {"192.0.2.5"}) == kind
