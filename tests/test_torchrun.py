"""The update's torchrun: its store listens on the address that was chosen, and on no other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import DEADLINE_S, free_port

from fsbarrier.processes.addresses import candidate_addresses
from fsbarrier.processes.rendezvous import LISTENING, listen, port_of
from fsbarrier.processes.supervisor import own_program

HERE = Path(__file__).resolve().parent


@pytest.mark.torch
def test_the_store_listens_on_the_chosen_address_alone(tmp_path: Path) -> None:
    """And no process of it takes a file in the current directory for a library."""
    (tmp_path / "random.py").write_text("raise RuntimeError('this is not the library')")
    held = listen(("127.0.0.1", *candidate_addresses()))
    port = port_of(held[0])
    # Whoever probed has gone again.
    socket.create_connection(("127.0.0.1", port)).close()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = f"{HERE.parent}:{HERE}"
    nodes = []
    for rank in range(2):
        command = own_program("fsbarrier.workers.torchrun", "--nnodes", "2", "--node-rank", str(rank))
        command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["--max-restarts", "0", "-m", "listening_child"]
        fds = [] if rank else [one.fileno() for one in held]
        env[LISTENING] = ",".join(map(str, fds))
        nodes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path, pass_fds=fds)
        )
    for one in held:
        one.close()
    said = [node.communicate(timeout=DEADLINE_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    (line,) = [line for text in said for line in text.splitlines() if line.startswith("{")]
    assert json.loads(line) == {"sum": 2, "listens": ["127.0.0.1"]}


EXCHANGE = """
import os, sys
import torch.distributed as dist
rank = int(sys.argv[1])
if rank and os.geteuid() == 0:
    os.setuid(65534)
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
class Code:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[3]}",)
if rank:
    dist.all_gather_object([None, None], Code())
else:
    from fsbarrier.training.processes import gather_json
    print(gather_json({"own": 1}))
"""


@pytest.mark.torch
def test_whoever_reaches_an_update_can_end_it_and_runs_no_code(tmp_path: Path) -> None:
    """The second process is another user's, and sends a pickle into the exchange of the first."""
    address = f"tcp://127.0.0.1:{free_port()}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE.parent)}
    words = [sys.executable, "-c", EXCHANGE]
    victim, peer = (
        subprocess.Popen(
            [*words, rank, address, str(tmp_path / "ran")], stderr=subprocess.PIPE, text=True, env=env
        )
        for rank in "01"
    )
    said = victim.communicate(timeout=DEADLINE_S)[1]
    peer.communicate(timeout=DEADLINE_S)
    assert not (tmp_path / "ran").exists(), "code of the other user ran"
    assert victim.returncode != 0 and "process 1 of this update sent something that is not JSON" in said
