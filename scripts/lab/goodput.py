#!/usr/bin/env python3
"""The goodput of the demo on three nodes of this machine while one daemon is killed every ten iterations.

    python scripts/lab/goodput.py --iterations 40 --every 10 --seed 0

The demo runs with the product's own settings. In the middle of every ten iterations, at a random moment, one daemon gets SIGKILL, by turns
the leader and another node, and is started again at once, as a scheduler would do it. Prints what the report says at the end, the goodput
and the seconds that each failure cost, and what it cost beside: finished groups of answers that were rolled out again, and updates that
were begun again. The sterner figure compares the wall time with that of as many undisturbed iterations, so that it also counts slow ones,
such as those in which a new vLLM server starts on the same cores. Exit code 0: the run has finished, and its goodput is at least 0.90.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(Path(__file__).resolve().parent)]

from chaos import Chaos  # noqa: E402

from fsbarrier.data.demo_tasks import DEMO_SETTINGS, FOLDER  # noqa: E402
from fsbarrier.errors import FsbarrierError  # noqa: E402
from fsbarrier.rundir.heartbeats import read_beats  # noqa: E402
from fsbarrier.trajectories import scan_rank_file  # noqa: E402
from fsbarrier.view.run_status import look_once  # noqa: E402
from fsbarrier.wording import duration  # noqa: E402

NODES, GOAL = 3, 0.90
UPDATE = "update"


class Struck(Chaos):
    """The demo's daemons, and who kills one of them now and then."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        super().__init__(arguments, folder)
        self.iterations, self.every = arguments.iterations, arguments.every
        # iteration, node rank, whether it led
        self.killed: list[tuple[int, int, bool]] = []

    def flags(self, arguments: argparse.Namespace) -> list[str]:
        """The demo's task, model and settings."""
        if arguments.program != "rl":
            return [f"iterations={arguments.iterations}", *arguments.settings]
        chosen = DEMO_SETTINGS | {"iterations": arguments.iterations, "checkpoint.keep_trajectories": 0}
        settings = [f"{name}={value}" for name, value in chosen.items()]
        return ["--data-path", str(FOLDER), "--model", str(FOLDER / "model"), *settings, *arguments.settings]

    def iteration(self) -> int:
        """Where the furthest node is, by its heartbeat."""
        try:
            return max((beat.iteration for beat in read_beats(self.log_path).values()), default=0)
        except (FsbarrierError, OSError):
            return 0

    def kill_now_and_then(self) -> None:
        """Until the last iterations: kill in the middle of every `every` of them. A killed daemon is started again at once."""
        due, began, entered, took_s = self.every // 2, 0, time.monotonic(), 1.0
        while (iteration := self.iteration()) < self.iterations and "dead" not in (
            n.state for n in self.nodes
        ):
            now = time.monotonic()
            if iteration > began:
                # The moment is anywhere in an iteration as long as the last one.
                took_s, began, entered = now - entered, iteration, now
                wait_s = self.dice.uniform(0.0, took_s)
            if iteration >= due and now - entered >= wait_s:
                self.kill_one(iteration)
                due += self.every
            self.idle.wait(0.05)

    def kill_one(self, iteration: int) -> None:
        leader = int(self.newest().get("leader", 0))
        leads = len(self.killed) % 2 == 0
        others = [node for node in self.nodes if node.rank != leader]
        node = self.nodes[leader] if leads else self.dice.choice(others)
        node.send(signal.SIGKILL)
        node.start()
        self.killed.append((iteration, node.rank, leads))
        self.show(f"iteration {iteration}: node {node.rank} killed and started again")


def groups_again(log_path: Path) -> Counter[int]:
    """iteration -> the finished groups of training tasks that more than one part holds: what was there was not used."""
    again: Counter[int] = Counter()
    found: dict[int, Counter[int]] = {}
    for path in (log_path / "train_trajectories").glob("*.part"):
        iteration = int(path.name.split(".iteration")[1].split("_")[0])
        found.setdefault(iteration, Counter()).update(
            group.task_index for group in scan_rank_file(path).groups
        )
    for iteration, tasks in found.items():
        again[iteration] = sum(count - 1 for count in tasks.values())
    return again


def tell(struck: Struck) -> float:
    """Print what the run was; gives its goodput."""
    reader, status = look_once(struck.log_path)
    again, rows = groups_again(struck.log_path), reader.rows()
    begun = Counter(row.iteration for row in rows if row.phase_name == UPDATE)
    for iteration, rank, leads in struck.killed:
        who = f"node {rank}{' (leader)' if leads else ''}"
        lost = f"{again[iteration]} finished groups and {begun[iteration] - 1} updates done again"
        print(f"killed in iteration {iteration}: {who}; {lost}")
    for one in status.interruptions:
        print(f"{duration(one.cost_s)} lost before generation {one.generation}: {one.reason}")
    # The first iteration has one-time costs.
    times, later = status.finished_times[1:], [row for row in rows if row.iteration > 1]
    disturbed = {row.iteration for row in rows if row.coordination_s is None}
    alone = [one.seconds for one in times if not disturbed & {one.iteration, one.iteration - 1}]
    goodput = status.goodput or 0.0
    if alone:
        whole_s = max(row.began_at + row.seconds for row in later) - min(row.began_at for row in later)
        print(
            f"{len(times)} iterations after the first: {median(alone):.1f} s an undisturbed one (median of {len(alone)}), and "
            f"{whole_s / len(times):.1f} s with all that the failures cost, so {median(alone) * len(times) / whole_s:.2f} of the time"
        )
    print(f"load of this machine at the end: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")
    print(f"goodput {goodput:.3f}, goal {GOAL:.2f}: {'met' if goodput >= GOAL else 'MISSED'}")
    return goodput


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=40, help="of the run (default 40)")
    parser.add_argument("--every", type=int, default=10, help="iterations for each kill (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--program", default="rl", help="another one, without the demo's settings, such as toy"
    )
    parser.add_argument("--path", type=Path, help="where to make the run (default: temporary); kept if given")
    parser.add_argument("settings", nargs="*", help="further ones, such as eval_interval=5")
    arguments = parser.parse_args()
    arguments.nodes = NODES
    folder = Path(tempfile.mkdtemp(prefix="goodput-", dir=arguments.path))
    struck = Struck(arguments, folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        struck.start()
        struck.kill_now_and_then()
        wrong = struck.ends()
    finally:
        struck.kill_all()
    print("\n".join(wrong))
    goodput = tell(struck)
    if wrong or arguments.path is not None:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong or goodput < GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
