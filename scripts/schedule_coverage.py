"""Which lines and branches of the protocol's code no simulated schedule executes.

    pip install coverage                          it is not among the locked requirements
    python scripts/schedule_coverage.py           prints the share of each file, and what is never executed
    python scripts/schedule_coverage.py --scale 5 five times as many schedules

Measured are fsbarrier/protocol, fsbarrier/node and fsbarrier/group. docs/proof.md says of what is left why no schedule comes there.
"""

from __future__ import annotations

import argparse
import sys
import threading
from dataclasses import replace
from pathlib import Path

try:
    import coverage
except ImportError:
    sys.exit("schedule_coverage.py: pip install coverage (it is not among the locked requirements)")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ROOMS = ("protocol", "node", "group")
#: what works with threads, processes and real files, and has no part in what nodes agree upon (docs/proof.md says what tests it)
EDGES = (
    "node/admission.py",
    "node/code_digests.py",
    "node/context_maker.py",
    "node/daemon.py",
    "node/directory_watch.py",
    "node/event_log.py",
    "node/fingerprint.py",
    "node/free_ranks.py",
    "node/job.py",
    "node/job_runner.py",
    "node/notifier.py",
    "node/polling.py",
    "node/rank_lock.py",
    "node/run_node.py",
    "node/tracking.py",
    "node/weights.py",
    "node/work_kinds.py",
    "node/worker_program.py",
    "group/bounded_wait.py",
    "group/group.py",
    "group/json_objects.py",
    "group/member_threads.py",
    "group/noted_store.py",
)


def follow_interruptible_calls() -> None:
    """Measure looks that are held up, too: they run in threads that `threading` does not know."""
    from fsbarrier.sim.interruptible import InterruptibleCall

    main = InterruptibleCall._main

    def measured(self: InterruptibleCall) -> None:
        sys.settrace(threading.gettrace())
        main(self)

    InterruptibleCall._main = measured  # type: ignore[method-assign]


def run(scale: int) -> int:
    """Run the schedules; gives how many broke an invariant."""
    from fsbarrier.sim.campaign import campaign
    from fsbarrier.sim.faults import USUAL, parse_mix
    from fsbarrier.sim.setup import Setup

    follow_interruptible_calls()
    usual = Setup(mix=USUAL)
    plans = (
        (Setup(), 20),
        (usual, 500),
        (replace(usual, iterations=3), 150),
        (replace(usual, nodes=5), 40),
        (replace(usual, groups=True), 300),
        (Setup(mix=parse_mix("stop,leave,crash")), 150),
        (Setup(mix=parse_mix("lost,errors,twin,crash")), 200),
        (Setup(mix=parse_mix("unreadable,pause,crash,stale"), iterations=3), 150),
        (Setup(mix=parse_mix("program"), policy="shrink"), 100),
        (Setup(mix=parse_mix("old,crash,unreadable"), iterations=2), 200),
        (Setup(mix=parse_mix("old,crash,version"), iterations=10), 30),
        (Setup(mix=parse_mix("slow,stale,twin,errors"), groups=True), 200),
        (Setup(mix=parse_mix("slow"), groups=True), 200),
    )
    return sum(
        bool(verdict.violations)
        for number, (setup, seeds) in enumerate(plans)
        for verdict in campaign(range(number * 1_000_000, number * 1_000_000 + seeds * scale), setup)
    )


def report(measured: coverage.Coverage) -> None:
    total = [0, 0]
    for path in sorted(p for room in ROOMS for p in (ROOT / "fsbarrier" / room).glob("*.py")):
        name = str(path.relative_to(ROOT / "fsbarrier"))
        found = measured._analyze(str(path))
        numbers = found.numbers
        if name in EDGES or not numbers.n_statements:
            continue
        done, all_ = numbers.ratio_covered
        total[0] += done
        total[1] += all_
        missing = [*(f"line {lines}" for lines in [found.missing_formatted()] if lines)]
        missing += [
            f"{line} -> {', '.join('exit' if to < 0 else str(to) for to in tos)}"
            for line, tos in sorted(found.missing_branch_arcs().items())
            if line not in found.missing
        ]
        print(f"{name:32} {numbers.pc_covered:6.1f} %  {'; '.join(missing)}")
    print(f"{'together':32} {100 * total[0] / total[1]:6.1f} %")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=int, default=1, help="so many times as many schedules")
    scale = parser.parse_args().scale
    measured = coverage.Coverage(
        data_file=None, branch=True, source=[str(ROOT / "fsbarrier" / room) for room in ROOMS]
    )
    measured.start()
    broken = run(scale)
    measured.stop()
    report(measured)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
