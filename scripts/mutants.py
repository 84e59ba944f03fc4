"""Does anything notice when a promise is broken? Puts one deliberate fault after another into a copy of the source (mutation.py).

    python scripts/mutants.py --jobs 2               all of them; the table goes into docs/proof.md
    python scripts/mutants.py --area group           one table of scripts/mutant_tables/
    python scripts/mutants.py Situation.joiners ...  those with one of these words in their names
    python scripts/mutants.py --results F --minutes 9    those that F does not know yet, for nine minutes; F knows their verdicts then
    python scripts/mutants.py --quick --results F    without the slow tests: a fault that only they could find stays unjudged

For each fault: the quick tests of what was changed, then schedules of the simulator and the stories of tests/scenarios, then its
other tests, until something finds it. Tests that take little time come first. What a story prints does not count, only the invariants
that it breaks, and a test counts only if it passes without the fault. Exit code 1 where a fault that breaks a promise survives, where
one that was recorded as harmless does not, or where one cannot be put in. (The file is longer than others because of its list of tests.)
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
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from forked import Forks
from mutation import ROOT, Mutant, mutate, read_tables

PAGE = ROOT / "docs" / "proof.md"
BEGIN, END = "<!-- mutants: written by scripts/mutants.py -->", "<!-- mutants end -->"
COPIED = ("fsbarrier", "phases", "tests", "docs", "scripts", "pyproject.toml", "README.md", "run.sh")
# Processor time after which schedules, which wait for nothing, count as endless; and how long all tests of one fault may take.
SCHEDULES_CPU_S, TESTS_S = 240, 1800.0
# after which one of them counts as endless
TEST_S = 120
# pytest's exit code where all tests were passed over
NO_TESTS_LEFT = 5
# Pytest would like to rewrite the assertions of its plugins, which forked.py has imported.
IMPORTED_EARLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")

#: Which tests are about a file, by the beginning of its name: the first line that fits counts. Those before the bar take seconds, and
#: come before the schedules; the others come after them.
TESTS = (
    ("fsbarrier/protocol/codec", "heartbeats runrecord | membership unreadable fuzz"),
    (
        "fsbarrier/protocol/",
        "machine succession lost assign | heartbeats resume fact_removal group unreadable restarts",
    ),
    ("fsbarrier/node/rank_lock", "rank_lock"),
    ("fsbarrier/node/free_ranks", "free_ranks"),
    ("fsbarrier/node/join_writer", "join_writer"),
    ("fsbarrier/node/context_maker", "revisions resume program_rows | take_over unreadable toy_run"),
    ("fsbarrier/node/job", "node_work admission kept_program"),
    ("fsbarrier/node/wor", "durability node_work admission kept_program"),
    ("fsbarrier/node/weights", "weights_copy node_work"),
    ("fsbarrier/node/polling", "polling quiet_waits heartbeats detection"),
    ("fsbarrier/node/daemon", "heartbeats membership detection restarts supervisor"),
    (
        "fsbarrier/node/loop",
        "heartbeats resume group_edges announcement durability fact_removal revisions | unreadable membership group detection restarts",
    ),
    (
        "fsbarrier/node/",
        "resume heartbeats durability fact_removal | unreadable revisions membership group_edges group detection restarts",
    ),
    ("fsbarrier/group/", "group_edges group | group_simulator"),
    ("fsbarrier/files", "files durability node_work aggregate trajectories"),
    ("fsbarrier/retry", "retry files"),
    ("fsbarrier/rundir/record_store", "files durability heartbeats fact_removal group_edges unreadable"),
    ("fsbarrier/rundir/heart", "heartbeats membership rank_lock detection"),
    ("fsbarrier/rundir/stop", "membership restarts policies"),
    ("fsbarrier/rundir/runrecord", "runrecord fuzz"),
    ("fsbarrier/rundir/revisions", "revisions"),
    ("fsbarrier/rundir/weights", "weights_copy"),
    ("fsbarrier/rundir/checkpoints", "durability node_work weights_copy retention export fuzz"),
    ("fsbarrier/rundir/retention", "retention durability node_work"),
    ("fsbarrier/rundir/journal", "event_log status fuzz"),
    ("fsbarrier/rundir/", "durability retention node_work fuzz export"),
    ("fsbarrier/data/merge", "durability aggregate trajectories torch_zip tables recover"),
    ("fsbarrier/data/", "durability trajectories torch_zip aggregate fuzz tables recover"),
    ("fsbarrier/rollouts/refills", "refills"),
    ("fsbarrier/rollouts/rollout_spec", "program_rows rollout"),
    ("fsbarrier/rollouts/", "program_rows take_over refills"),
    ("fsbarrier/maintenance/", "unreadable recover revisions"),
    ("fsbarrier/training/", "trainer_state checkpoint_ranks"),
    ("fsbarrier/sim/", ""),
    ("fsbarrier/host/own_folder", "own_folder weights_copy"),
    ("phases/rl", "assign program_rows | refills take_over"),
    ("fsbarrier/sharing", "assign program_rows | refills take_over"),
    ("fsbarrier/decisions", "assign program_rows retention | unreadable"),
    ("fsbarrier/program", "assign program_rows retention | take_over"),
    ("fsbarrier/", "supervisor node_work"),
)
#: what the simulator runs: schedules of nodes, of groups
RUNS = (
    "fsbarrier/protocol/",
    "fsbarrier/node/",
    "fsbarrier/sim/",
    "fsbarrier/program",
    "fsbarrier/decisions",
    "fsbarrier/sharing",
    "fsbarrier/rundir/heart",
    "phases/rl",
)
GROUPS = (*RUNS[:2], "fsbarrier/group/")
LATER = (
    "fsbarrier/node/daemon",
    "fsbarrier/node/job",
    "fsbarrier/node/wor",
    "fsbarrier/node/rank_lock",
    "fsbarrier/node/polling",
    "fsbarrier/node/weights",
)


#: what is said of a fault that quick tests and schedules do not find, where the slow tests are left out
LEFT_OUT = "left to the slow tests"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `how` it was found ("schedules", "tests"), and `by` what; `how` "" where nothing found it."""

    mutant: Mutant
    how: str
    by: str

    @property
    def wrong(self) -> bool:
        return self.judged and (self.how == "") != bool(self.mutant.harmless)

    @property
    def judged(self) -> bool:
        return self.by != LEFT_OUT

    @property
    def line(self) -> str:
        found = f"{self.how}: {self.by}" if self.how else self.by
        return f"{self.mutant.name}\n    {found}{'' if not self.wrong else '   <--'}"


# --- one mutant in one copy -------------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the tree, in which one fault after the other is put in and taken out again."""

    def __init__(self, folder: Path, seeds: int, times: Path | None = None, *, quick: bool = False) -> None:
        self.folder, self.seeds, self.quick = folder, seeds, quick
        self._forks = Forks(folder, TEST_TIMES=str(times or folder / "times"))
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)

    def close(self) -> None:
        self._forks.close()

    def judge(self, mutant: Mutant) -> Verdict:
        changed = {path.relative_to(ROOT): text for path, text in mutate(mutant).items()}
        self._put_in(changed)
        try:
            about = next(iter(changed)).as_posix()
            quick, _, slow = next(files for start, files in TESTS if about.startswith(start)).partition("|")
            if by := self._tests(quick.split(), changed):
                return Verdict(mutant, "tests", by)
            if by := self._schedules([path.as_posix() for path in changed]):
                return Verdict(mutant, "schedules", by)
            if self.quick and slow:
                return Verdict(mutant, "", LEFT_OUT)
            if by := self._tests(slow.split(), changed):
                return Verdict(mutant, "tests", by)
            return Verdict(mutant, "", "nothing finds it")
        finally:
            self._take_out(changed)

    def _put_in(self, changed: Mapping[Path, str]) -> None:
        for path, text in changed.items():
            (self.folder / path).write_text(text)

    def _take_out(self, changed: Mapping[Path, str]) -> None:
        for path in changed:
            shutil.copy(ROOT / path, self.folder / path)

    def _schedules(self, changed: Sequence[str]) -> str:
        """What the first bad schedule breaks, "" where all are good."""
        kinds = [
            kind
            for kind, rooms in (("runs", RUNS), ("groups", GROUPS))
            if any(path.startswith(rooms) and not path.startswith(LATER) for path in changed)
        ]
        if not kinds:
            return ""
        words = [
            str(self.folder / "scripts" / "mutants.py"),
            "--schedules",
            *kinds,
            "--seeds",
            str(self.seeds),
        ]
        done = self._forks.run(words, None)
        if done.returncode == 0:
            return ""
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return "a schedule does not end"
        said = done.stdout.strip().splitlines() or ["no word"]
        return said[-1]

    def _tests(self, about: Sequence[str], changed: Mapping[Path, str]) -> str:
        """The first test that fails with the fault and passes without it, "" where there is none."""
        if not about:
            return ""
        torch = any("training" in path.parts for path in changed)
        kinds = f"not slow and not engine{'' if torch else ' and not torch'}"
        words = [f"tests/test_{name}.py" for name in about]
        passed_over: list[str] = []
        while True:
            done = self._pytest("-m", kinds, *words, *passed_over)
            if done.returncode in (0, NO_TESTS_LEFT):
                return ""
            failed = self._failed()
            if done.returncode == -signal.SIGKILL or not failed:
                return "its tests do not end"
            self._take_out(changed)
            alone = self._pytest(*failed)
            self._put_in(changed)
            if alone.returncode == 0:
                said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return (said or failed)[0].removeprefix("FAILED tests/")[:200]
            passed_over += [f"--deselect={name}" for name in failed]

    def _pytest(self, *words: str) -> subprocess.CompletedProcess[str]:
        shutil.rmtree(self.folder / ".pytest_cache", ignore_errors=True)
        options = (
            "-x",
            "-q",
            "--tb=no",
            f"--timeout={TEST_S}",
            "-o",
            "cache_dir=.pytest_cache",
            *IMPORTED_EARLY,
            "-p",
            "scripts.fastest_first",
        )
        return self._forks.run(["-m", "pytest", *options, *words], TESTS_S)

    def _failed(self) -> list[str]:
        """The tests that failed in the last run."""
        noted = self.folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
        return [*json.loads(noted.read_text())] if noted.exists() else []


# --- schedules, in a process of the copy ------------------------------------------------------------------------------------------


def schedules(kinds: Sequence[str], seeds: int) -> str:
    """The first violation in any schedule or story, "" where there is none. Runs the fsbarrier that is on the path."""
    resource.setrlimit(resource.RLIMIT_CPU, (SCHEDULES_CPU_S, SCHEDULES_CPU_S + 5))
    sys.path.insert(0, os.environ["PYTHONPATH"])
    from fsbarrier.sim.campaign import judge
    from fsbarrier.sim.invariants import budget, i12_operations
    from fsbarrier.sim.scenario import play
    from fsbarrier.sim.setup import Setup
    from fsbarrier.sim.world import World

    usual = Setup()
    setups = {
        "runs": [
            (usual, 1.0),
            (replace(usual, iterations=3), 0.3),
            (replace(usual, nodes=6), 0.2),
        ],
        "groups": [(replace(usual, groups=True), 1.0)],
    }
    for kind in kinds:
        for setup, share in setups[kind]:
            for seed in range(max(1, round(seeds * share))):
                violations = judge(seed, setup).violations
                if violations:
                    what = f"{setup.nodes} nodes, {setup.iterations} iterations{', groups' * setup.groups}"
                    return f"{violations[0].number} in seed {seed} ({what})"
    if "runs" in kinds:
        for story in sorted((ROOT / "tests" / "scenarios").glob("*.txt")):
            broken = play(story.read_text().partition("----\n")[0])[1]
            if broken:
                return f"{broken[0].number} in the story {story.stem}"
        world = World(
            0, Setup(5, iterations=4, mix=frozenset(), phases="both", policy="shrink", lengths=(0.01,))
        )
        world.run()
        if i12_operations(world.history) > budget(5):
            return "I12 with 5 nodes"
    return ""


# --- all of them --------------------------------------------------------------------------------------------------------------------


def judge_all(
    mutants: Sequence[Mutant],
    jobs: int,
    seeds: int,
    until: float,
    times: Path | None = None,
    *,
    quick: bool = False,
) -> Iterator[Verdict]:
    """The verdicts, as they come; none is begun after `until`. `times`: how long tests take, of which it takes note.

    Raises DoesNotApply before anything is run.
    """
    for mutant in mutants:
        mutate(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as threads:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            (Path(folder) / str(number)).mkdir()
            copies.put(Copy(Path(folder) / str(number), seeds, times, quick=quick))

        def work(mutant: Mutant) -> Verdict | None:
            copy = copies.get()
            try:
                return copy.judge(mutant) if time.monotonic() < until else None
            finally:
                copies.put(copy)

        try:
            for verdict in takewhile(lambda verdict: verdict is not None, threads.map(work, mutants)):
                assert verdict is not None
                yield verdict
        finally:
            for _ in range(jobs):
                copies.get().close()


def read_results(path: Path) -> dict[str, Verdict]:
    """By their faults' keys, the verdicts that a file knows; the last one on each fault counts."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known, by_key = {line["fault"]: line for line in lines}, {key(mutant): mutant for mutant in read_tables()}
    return {
        fault: Verdict(by_key[fault], line["how"], line["by"])
        for fault, line in known.items()
        if fault in by_key
    }


def key(mutant: Mutant) -> str:
    """What a fault is known by in a file of verdicts: its line in the table and the function's name may change."""
    return f"{mutant.area}: {mutant.promise} -> {mutant.edits[0].new}"


def table(verdicts: Sequence[Verdict], left: Sequence[Mutant] = ()) -> str:
    """What docs/proof.md says: counts by table, which faults are harmless or survive, and which of those `left` to run are harmless."""
    rows = ["| faults in | put in | found | harmless |", "| --- | --- | --- | --- |"]
    for area in dict.fromkeys(verdict.mutant.area for verdict in verdicts):
        ours = [verdict for verdict in verdicts if verdict.mutant.area == area]
        found, harmless = sum(bool(one.how) for one in ours), sum(bool(one.mutant.harmless) for one in ours)
        rows.append(f"| {area} | {len(ours)} | {found} | {harmless} |")
    judged = [one.mutant for one in verdicts if one.mutant.harmless]
    survivors = [one.mutant for one in verdicts if one.wrong and not one.how]
    for title, chosen in (
        ("Nothing finds these, and nothing is lost by them:", judged),
        ("These are harmless too, and were not run again:", [one for one in left if one.harmless]),
        ("Nothing finds these:", survivors),
    ):
        if chosen:
            rows += ["", title, ""]
            rows += [f"* `{one.edits[0].where}`: {one.harmless or one.promise}" for one in chosen]
    return "\n".join(rows)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="words in the names of mutants (default: all)")
    parser.add_argument("--area", help="one table of scripts/mutant_tables/")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--seeds", type=int, default=300, help="schedules of each kind (default 300)")
    parser.add_argument(
        "--results", type=Path, help="a file of verdicts: the faults that it knows are not judged again"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no further fault after so many"
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave faults unjudged that only the slow tests could find"
    )
    parser.add_argument("--keep-page", action="store_true", help="do not write docs/proof.md")
    parser.add_argument("--schedules", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.schedules:
        found = schedules(arguments.schedules, arguments.seeds)
        print(found)
        return 1 if found else 0
    known = read_results(arguments.results) if arguments.results else {}
    mutants = [
        mutant
        for mutant in read_tables()
        if arguments.area in (None, mutant.area)
        and (
            any(word in mutant.name for word in arguments.names)
            if arguments.names
            else key(mutant) not in known
        )
    ]
    if arguments.names and not mutants:
        parser.error(f"no fault has {' or '.join(arguments.names)} in its name")
    verdicts = []
    until = time.monotonic() + arguments.minutes * 60
    times = arguments.results.absolute().with_suffix(".times") if arguments.results else None
    for verdict in judge_all(mutants, arguments.jobs, arguments.seeds, until, times, quick=arguments.quick):
        print(verdict.line, flush=True)
        if not verdict.judged:
            continue
        verdicts.append(verdict)
        if arguments.results:
            with arguments.results.open("a") as file:
                print(
                    json.dumps({"fault": key(verdict.mutant), "how": verdict.how, "by": verdict.by}),
                    file=file,
                )
    wrong = [verdict for verdict in verdicts if verdict.wrong]
    print(f"{len(verdicts)} mutants, {len(wrong)} are not as they should be")
    print("\n".join(verdict.line for verdict in wrong))
    if not (arguments.names or arguments.area or arguments.keep_page):
        known |= {key(verdict.mutant): verdict for verdict in verdicts}
        faults = read_tables()
        judged = [known[key(mutant)] for mutant in faults if key(mutant) in known]
        left = [mutant for mutant in faults if key(mutant) not in known]
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{table(judged, left)}\n{END}{rest.partition(END)[2]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
