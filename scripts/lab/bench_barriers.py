"""Barriers of `fsbarrier.join` beside those of other systems: N processes on this machine, back to back, in one run.

    python scripts/lab/bench_barriers.py --nodes 3,16,64 [--ray-python /tmp/ray/bin/python] [--etcd /usr/bin/etcd] [--zookeeper HOST:PORT]

Prints milliseconds from the last arrival to the last release. The bare loop is measured before, between and after the others, since
other work on the machine changes all of them alike. What is not installed is left out, with a line that says so:

* bare: a file for each process and round, and a loop of directory scans without records, membership or heartbeats;
* group: `fsbarrier.join`, as any script uses it;
* daemons: the program `ping`, 14 barriers an iteration;
* gloo: `torch.distributed.barrier()`;
* tcpstore: PyTorch's TCPStore: all add one to a counter, and wait for a key that the last of them sets;
* ray: an actor that counts arrivals and answers all at once, asked by N actors;
* etcd: each puts a key and watches the prefix, through etcd's own HTTP gateway;
* zookeeper: kazoo's DoubleBarrier without its second half, at a server that runs already.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench_latency import START_S, Latency, ping

from fsbarrier.errors import ProgramFailed
from fsbarrier.network.listening import LOOPBACK, listen, port_of
from fsbarrier.store import files
from fsbarrier.store.retry import Backoff

#: when a process came to a barrier, and when it was released, on the monotonic clock
Passage = tuple[float, float]
Barriers = Callable[[Path, int, int, int], list[Passage]]
#: This interpreter, with the same -P option.
PYTHON = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
#: polling interval of the bare loop
PAUSES = Backoff(0.0001, 0.001)
#: time limits of one round, in seconds
ROUND_S = 10.0


def barriers_of(command: Sequence[str], kind: str, folder: Path, nodes: int, rounds: int) -> Latency:
    """Measure N processes of `command`, which gets kind, folder, rank, N and rounds as arguments. Raises ProgramFailed."""
    processes = [
        subprocess.Popen(
            [*command, kind, str(folder), str(rank), str(nodes), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(nodes)
    ]
    times: list[list[Passage]] = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=START_S + nodes + rounds * ROUND_S)
            if process.returncode:
                said = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                raise ProgramFailed(f"bench: a {kind} process failed: {said}")
            times.append(json.loads(out))
    except subprocess.TimeoutExpired:
        raise ProgramFailed(f"bench: the {kind} processes did not end in time") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return latency(times)


def latency(times: Sequence[Sequence[Passage]]) -> Latency:
    """Statistics from each process's passages. Raises ProgramFailed if there are none."""
    # As with ping, skip the first barrier, when the processes are still starting.
    counted = list(zip(*times, strict=True))[1:]
    return Latency.of([max(left for _, left in one) - max(arrived for arrived, _ in one) for one in counted])


def passages(barrier: Callable[[int], object], rounds: int) -> list[Passage]:
    """Pass `rounds` barriers."""
    times = []
    for number in range(rounds):
        arrived = time.monotonic()
        barrier(number)
        times.append((arrived, time.monotonic()))
    return times


def bare_process(folder: Path, rank: int, nodes: int, rounds: int) -> list[Passage]:
    """One process of the bare loop. Raises TimeoutError."""
    deadline, idle = time.monotonic() + START_S + nodes + rounds * ROUND_S, threading.Event()

    def barrier(number: int) -> None:
        place, pauses = folder / f"round-{number:06d}", iter(PAUSES)
        place.mkdir(exist_ok=True)
        os.close(files.open_new(place / f"node-{rank:04d}"))
        while len(os.listdir(place)) < nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"round {number}: the other processes did not arrive")
            idle.wait(next(pauses))

    return passages(barrier, rounds)


def group_process(folder: Path, rank: int, nodes: int, rounds: int) -> list[Passage]:
    """One member of a group. Raises NodeError."""
    import fsbarrier

    timing = {"beat_s": 5.0, "suspect_s": 15.0, "dead_s": 60.0} if nodes > 16 else {}
    with fsbarrier.join(
        folder, node_rank=rank, num_nodes=nodes, timeout_s=START_S + nodes, **timing
    ) as group:
        return passages(lambda number: group.barrier(), rounds)


# --- one process of each ------------------------------------------------------------------------------------------------


def gloo(folder: Path, rank: int, nodes: int, rounds: int) -> list[Passage]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=nodes)
    times = passages(lambda number: dist.barrier(), rounds)
    dist.destroy_process_group()
    return times


def tcpstore(folder: Path, rank: int, nodes: int, rounds: int) -> list[Passage]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", int(os.environ["BENCH_PORT"]), nodes, is_master=rank == 0)

    def barrier(number: int) -> None:
        if store.add(f"arrived-{number}", 1) == nodes:
            store.set(f"all-{number}", "")
        store.wait([f"all-{number}"])

    times = passages(barrier, rounds)
    # The first process is the server: it stays until all have the last answer.
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < nodes:
        pass
    return times


def etcd(folder: Path, rank: int, nodes: int, rounds: int) -> list[Passage]:
    from base64 import b64encode
    from http.client import HTTPConnection

    def coded(text: str) -> str:
        return b64encode(text.encode()).decode()

    def post(path: str, asked: object) -> Any:
        connection.request("POST", path, json.dumps(asked))
        return json.loads(connection.getresponse().read())

    port = int(os.environ["BENCH_PORT"])
    connection, watching = HTTPConnection("127.0.0.1", port), HTTPConnection("127.0.0.1", port)
    # From the first revision on, so that nothing is missed.
    whole = {"key": coded("round/"), "range_end": coded("round0"), "start_revision": 1}
    watching.request("POST", "/v3/watch", json.dumps({"create_request": whole}))
    events = watching.getresponse()
    arrived: dict[str, int] = {}

    def barrier(number: int) -> None:
        # The key of a process's round is its own, the value is the round.
        post("/v3/kv/put", {"key": coded(f"round/{number}/{rank}"), "value": coded(str(number))})
        wanted = coded(str(number))
        while arrived.get(wanted, 0) < nodes:
            for event in json.loads(events.readline())["result"].get("events", ()):
                arrived[event["kv"]["value"]] = arrived.get(event["kv"]["value"], 0) + 1

    return passages(barrier, rounds)


def zookeeper(folder: Path, rank: int, nodes: int, rounds: int) -> list[Passage]:
    DoubleBarrier: Any = import_module("kazoo.recipe.barrier").DoubleBarrier
    client = import_module("kazoo.client").KazooClient(os.environ["BENCH_ZOOKEEPER"])
    client.start()
    root = f"/bench-{folder.name}-{os.environ['BENCH_PORT']}"
    times = passages(lambda number: DoubleBarrier(client, f"{root}/{number}", nodes).enter(), rounds)
    client.stop()
    return times


def ray_processes(nodes: int, rounds: int) -> list[list[Passage]]:
    """All actors at once; this is the driver, run by the interpreter that has ray."""
    import asyncio

    ray = import_module("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)

    class Meeting:
        def __init__(self) -> None:
            self.arrived, self.all_here = 0, asyncio.Event()

        async def wait(self) -> None:
            self.arrived += 1
            if self.arrived < nodes:
                await self.all_here.wait()
                return
            self.all_here.set()
            self.arrived, self.all_here = 0, asyncio.Event()

    class Member:
        def run(self, meeting: Any) -> list[Passage]:
            return passages(lambda number: ray.get(meeting.wait.remote()), rounds)

    meeting = ray.remote(Meeting).options(num_cpus=0, max_concurrency=nodes).remote()
    members = [ray.remote(Member).options(num_cpus=0).remote() for _ in range(nodes)]
    times: list[list[Passage]] = ray.get([member.run.remote(meeting) for member in members])
    ray.shutdown()
    return times


PROCESSES: dict[str, Barriers] = {
    "bare": bare_process,
    "group": group_process,
    "gloo": gloo,
    "tcpstore": tcpstore,
    "etcd": etcd,
    "zookeeper": zookeeper,
}

# --- all of them --------------------------------------------------------------------------------------------------------


class NotHere(Exception):
    """What is missing to measure a system."""


def measure(kind: str, folder: Path, nodes: int, rounds: int, args: argparse.Namespace) -> Latency:
    """Raises NotHere, ProgramFailed."""
    if kind == "daemons":
        return ping(folder, nodes, 1 + rounds // 14)
    files.make_dirs(folder)
    if kind == "ray":
        return by_ray(nodes, rounds, args.ray_python)
    needs = {"gloo": "torch", "tcpstore": "torch", "zookeeper": "kazoo"}.get(kind)
    if needs is not None and importlib.util.find_spec(needs) is None:
        raise NotHere(f"this Python has no {needs}")
    if kind == "zookeeper" and args.zookeeper is None:
        raise NotHere("no --zookeeper HOST:PORT")
    with listen(LOOPBACK)[0] as listening:
        port = port_of(listening)
    os.environ |= {"BENCH_PORT": str(port), "BENCH_ZOOKEEPER": args.zookeeper or "", "OMP_NUM_THREADS": "1"}
    command = [*PYTHON, str(Path(__file__).resolve()), "--process"]
    if kind == "etcd":
        with etcd_server(args.etcd, port, folder):
            return barriers_of(command, kind, folder, nodes, rounds)
    return barriers_of(command, kind, folder, nodes, rounds)


def by_ray(nodes: int, rounds: int, python: str) -> Latency:
    if subprocess.run([python, "-c", "import ray"], stderr=subprocess.DEVNULL).returncode:
        raise NotHere(f"{python} has no ray")
    words = [python, str(Path(__file__).resolve()), "--ray", str(nodes), str(rounds)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    return latency(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def etcd_server(program: str, port: int, folder: Path) -> Iterator[None]:
    if shutil.which(program) is None:
        raise NotHere(f"no program {program}")
    with listen(LOOPBACK)[0] as listening:
        peers = f"http://127.0.0.1:{port_of(listening)}"
    here = f"http://127.0.0.1:{port}"
    words = [program, "--data-dir", str(folder / "etcd"), "--listen-client-urls", here]
    words += ["--advertise-client-urls", here, "--listen-peer-urls", peers]
    words += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if "serving insecure client requests" in line or "serving client traffic insecurely" in line:
                break
        # Its log is not read on: with a full pipe it would stop.
        subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        yield
    finally:
        server.kill()
        server.wait()


KINDS = ("group", "daemons", "gloo", "tcpstore", "ray", "etcd", "zookeeper")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", default="3,16,64", help="numbers of processes")
    parser.add_argument(
        "--rounds", type=int, default=200, help="barriers of each system (64 processes: a third)"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="which systems")
    parser.add_argument("--path", type=Path, default=None, help="measure on this folder's filesystem")
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has ray")
    parser.add_argument("--etcd", default="etcd", help="etcd's program")
    parser.add_argument("--zookeeper", default=None, help="HOST:PORT of a server that runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-barriers-", dir=args.path) as name:
        for nodes in map(int, args.nodes.split(",")):
            compare(Path(name), nodes, args)
    return 0


def compare(folder: Path, nodes: int, args: argparse.Namespace) -> None:
    rounds = args.rounds if nodes < 64 else args.rounds // 3
    print(f"{nodes} processes; load of this machine {os.getloadavg()[0]:.1f}")
    print(f"{'':<12}{'barriers':>10}{'median':>10}{'99 %':>10}{'max':>10}{'x bare':>10}", flush=True)
    bare: list[float] = []
    others = args.kinds.split(",")
    for number, kind in enumerate(("bare", *(one for other in others for one in (other, "bare")))):
        place = folder / f"{nodes}-{number}-{kind}"
        try:
            one = measure(kind, place, nodes, rounds, args)
        except NotHere as missing:
            print(f"{kind:<12}not measured: {missing}", flush=True)
            continue
        except (ProgramFailed, OSError, subprocess.SubprocessError) as error:
            # One system that fails does not end the comparison of the others.
            print(f"{kind:<12}failed: {error}".splitlines()[0], flush=True)
            continue
        finally:
            shutil.rmtree(place, ignore_errors=True)
        if kind == "bare":
            bare.append(one.median_s)
        ratio = one.median_s / statistics.mean(bare[-2:])
        times = "".join(f"{1000 * seconds:>10.2f}" for seconds in (one.median_s, one.p99_s, one.max_s))
        print(f"{kind:<12}{one.barriers:>10}{times}{ratio:>10.1f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        kind, place, *numbers = sys.argv[2:]
        print(json.dumps(PROCESSES[kind](Path(place), *map(int, numbers))))
    elif sys.argv[1:2] == ["--ray"]:
        print(json.dumps(ray_processes(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        sys.exit(main())
