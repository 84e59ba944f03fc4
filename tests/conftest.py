"""Shared by all tests: a clean environment, so that the suite gives the same answer in a terminal, in CI and inside a job."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from process_tree import Fifo, Watched

if TYPE_CHECKING:
    from complete_runs import Bench
    from test_rollout import Fake

# The same examples every time, however fast the machine is.
hypothesis.settings.load_profile("ci")

# What launchers set and fsbarrier reads: the rank that a test gets must be the one that it gives.
_PREFIXES = (
    "FSBARRIER_",
    "SLURM_",
    "SKYPILOT_",
    "DSTACK_",
    "OMPI_",
    "PMI_",
    "PET_",
    "LWS_",
    "VC_",
    "SM_",
    "PBS_",
    "LSB_",
    "LSF_",
)
_NAMES = (
    "NODE_RANK",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "NNODES",
    "NUM_NODES",
    "JOB_COMPLETION_INDEX",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPI_LOCALNRANKS",
    "PYTHONSAFEPATH",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the golden files of tests/scenarios anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What has asked for more time begins first, so that it is not what the others wait for in the end."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


@pytest.fixture
def warm_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command of this process runs as a program is a fork of a process that has imported what it needs (forks.py)."""
    import forks

    monkeypatch.setattr(subprocess, "run", forks.run_warm)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    """A server that answers as vLLM does."""
    # Not at the top: only tests of rollouts need it.
    from test_rollout import start_fake

    server = start_fake(tmp_path / "fake")
    yield server
    server.process.kill()
    server.process.communicate()


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Complete runs of the default program in about a second. Its imports take some."""
    import complete_runs

    made = complete_runs.Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables of a launcher that the suite itself may run under."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES) or name in _NAMES:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_reaches_what_tests_start() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and every process that a test starts would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The folder that holds fsbarrier/, phases/ and scripts/."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Real processes that the test may ask about, by handles that no later process can take over."""
    watched = Watched()
    yield watched
    watched.close()


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    """Where the processes of a tree write their ids."""
    fifo = Fifo(tmp_path / "fifo")
    yield fifo
    os.close(fifo.fd)
