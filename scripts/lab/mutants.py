"""Does anything notice when a promise is broken? Puts one deliberate fault after another into a copy of the source (mutation.py).

    python scripts/lab/mutants.py --jobs 2             all faults of faults.txt
    python scripts/lab/mutants.py I9 RowWatch.read     those with one of these words in their names

For each fault: schedules of the simulator and the stories of tests/scenarios, then the tests that the fault names, until something finds
it. What a story prints does not count, only the invariants that it breaks, and a test counts only if it passes without the fault. Exit
code 1 where a fault survives, or one cannot be put in.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutation import ROOT, DoesNotApply, Mutant, mutate, read_table

COPIED = ("fsbarrier", "phases", "tests", "docs", "scripts", "pyproject.toml", "README.md", "run.sh")
#: what the simulator runs of the package; a fault elsewhere is left to its tests
SIMULATED = (
    "protocol",
    "coordination",
    "run",
    "sim",
    "rundir",
    "phases",
    "sharing.py",
    "decisions.py",
    "program.py",
    "node.py",
    "context.py",
    "specs.py",
)
#: the tests of a fault that names none: those of the protocol and of a node
USUAL_TESTS = (
    "machine",
    "succession",
    "assign",
    "lost",
    "heartbeats",
    "fact_removal",
    "group_edges",
)
#: processor time after which schedules, which wait for nothing, count as endless
SCHEDULES_CPU_S = 240
#: how long one test, and all tests of one fault, may take
TEST_S, TESTS_S = 120, 1800
#: pytest's exit code where all tests were passed over
NO_TESTS_LEFT = 5


class Copy:
    """A copy of the tree, in which one fault after the other is put in and taken out again."""

    def __init__(self, folder: Path, seeds: int) -> None:
        self.folder, self.seeds = folder, seeds
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)

    def judge(self, mutant: Mutant) -> str:
        """What finds the fault; "" where nothing does."""
        changed = {path.relative_to(ROOT): text for path, text in mutate(mutant).items()}
        self._put_in(changed)
        try:
            simulated = any(part in SIMULATED for path in changed for part in path.parts)
            return (simulated and self._schedules()) or self._tests(mutant.tests or USUAL_TESTS, changed)
        finally:
            self._take_out(changed)

    def _put_in(self, changed: dict[Path, str]) -> None:
        for path, text in changed.items():
            (self.folder / path).write_text(text)

    def _take_out(self, changed: dict[Path, str]) -> None:
        for path in changed:
            shutil.copy(ROOT / path, self.folder / path)

    def _python(self, *words: str, within_s: float | None = None) -> subprocess.CompletedProcess[str]:
        """`python *words` in the copy. Raises TimeoutExpired after `within_s`."""
        environ = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child:
            try:
                said, _ = child.communicate(timeout=within_s)
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(words, child.returncode, said, "")

    def _schedules(self) -> str:
        """What the first bad schedule breaks, "" where all are good."""
        script = str(self.folder / "scripts" / "lab" / "mutants.py")
        done = self._python(script, "--schedules", "--seeds", str(self.seeds))
        if done.returncode == 0:
            return ""
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return "schedules: one does not end"
        return f"schedules: {(done.stdout.strip().splitlines() or ['no word'])[-1]}"

    def _tests(self, names: Sequence[str], changed: dict[Path, str]) -> str:
        """The first test that fails with the fault and passes without it, "" where there is none."""
        words = [f"tests/test_{name}.py" for name in names]
        passed_over: list[str] = []
        while True:
            try:
                done = self._pytest("-m", "not slow and not engine and not torch", *words, *passed_over)
            except subprocess.TimeoutExpired:
                return "tests: they do not end"
            if done.returncode in (0, NO_TESTS_LEFT):
                return ""
            if not (failed := self._failed()):
                return f"tests: {(done.stdout.strip().splitlines() or ['no word'])[-1]}"
            self._take_out(changed)
            alone = self._pytest(*failed)
            self._put_in(changed)
            if alone.returncode == 0:
                return f"tests: {failed[0].removeprefix('tests/')}"
            passed_over += [f"--deselect={name}" for name in failed]

    def _pytest(self, *words: str) -> subprocess.CompletedProcess[str]:
        shutil.rmtree(self.folder / ".pytest_cache", ignore_errors=True)
        options = ("-x", "-q", "--tb=no", f"--timeout={TEST_S}", "-o", "cache_dir=.pytest_cache")
        return self._python("-m", "pytest", *options, *words, within_s=TESTS_S)

    def _failed(self) -> list[str]:
        """The tests that failed in the last run."""
        noted = self.folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
        return [*json.loads(noted.read_text())] if noted.exists() else []


def schedules(seeds: int) -> str:
    """The first violation in any schedule or story, "" where there is none. Runs in a process of the copy."""
    resource.setrlimit(resource.RLIMIT_CPU, (SCHEDULES_CPU_S, SCHEDULES_CPU_S + 5))
    sys.path.insert(0, str(ROOT))
    from sim.campaign import judge
    from sim.scenario import play
    from sim.setup import Setup

    usual = Setup()
    kinds = {
        "3 nodes": (usual, 1.0),
        "3 iterations": (replace(usual, iterations=3), 0.3),
        "6 nodes": (replace(usual, nodes=6), 0.2),
        "groups": (replace(usual, groups=True), 0.5),
    }
    for kind, (setup, share) in kinds.items():
        for seed in range(max(1, round(seeds * share))):
            if violations := judge(seed, setup).violations:
                return f"{violations[0].number} in seed {seed} ({kind})"
    for story in sorted((ROOT / "tests" / "scenarios").glob("*.txt")):
        if broken := play(story.read_text().partition("----\n")[0])[1]:
            return f"{broken[0].number} in the story {story.stem}"
    return ""


def judge_all(mutants: Sequence[Mutant], jobs: int, seeds: int) -> list[Mutant]:
    """Print what finds each of them; gives those that survive. Raises DoesNotApply before anything is run."""
    for mutant in mutants:
        mutate(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as threads:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            (Path(folder) / str(number)).mkdir()
            copies.put(Copy(Path(folder) / str(number), seeds))

        def work(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                return copy.judge(mutant)
            finally:
                copies.put(copy)

        survivors = []
        for mutant, by in zip(mutants, threads.map(work, mutants), strict=True):
            print(f"{mutant.name}\n    {by or 'nothing finds it   <--'}", flush=True)
            survivors += [] if by else [mutant]
        return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="words in the names of faults (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--seeds", type=int, default=300, help="schedules of the usual kind (default 300)")
    parser.add_argument("--schedules", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.schedules:
        found = schedules(arguments.seeds)
        print(found)
        return 1 if found else 0
    mutants = [
        mutant
        for mutant in read_table()
        if not arguments.names or any(word in mutant.name for word in arguments.names)
    ]
    if not mutants:
        parser.error(f"no fault has {' or '.join(arguments.names)} in its name")
    try:
        survivors = judge_all(mutants, arguments.jobs, arguments.seeds)
    except DoesNotApply as problem:
        print(problem, file=sys.stderr)
        return 1
    print(f"{len(mutants)} faults, {len(survivors)} survive")
    print("\n".join(mutant.name for mutant in survivors))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
