"""Which changed lines does no test notice? Draws mutants of a room and shows each of them only the tests that execute its line.

    pip install '.[mutation]'                                         cosmic-ray makes the mutants, coverage says what executes what
    python scripts/lab/mutate_rooms.py map tests/test_machine.py ...    runs tests once; several calls add up
    python scripts/lab/mutate_rooms.py run protocol rewards --sample 300
    python scripts/lab/mutate_rooms.py report                           the table in docs/proof.md, and what survives

What is known lies in `--state`, and every command goes on where the last one ended. A mutant is killed where a test fails or does not end.
equivalent.txt lists those that no test can tell from the original, each with the reason. Annotations of functions do not count, since
nothing evaluates them. A line that runs only in programs which tests start is not measured here: no context of coverage names the test.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

try:
    import coverage
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names
    from cosmic_ray.work_db import WorkDB
    from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
except ImportError as problem:
    sys.exit(f"{problem}; install it with: pip install '.[mutation]'")

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
COPIED = (
    "fsbarrier",
    "phases",
    "tests",
    "docs",
    "scripts",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "run.sh",
)
#: processor-bound tests get so much longer than they took, and this on top
PATIENCE, LEAST_S = 10, 60
#: so many of the quickest tests of a module meet a change of what runs when it is imported
OF_A_MODULE = 40
CONFIG = "[run]\nrelative_files = true\n"


@dataclass(frozen=True)
class Change:
    """One mutant: what a line of a file becomes."""

    path: str
    spec: MutationSpec
    old: str
    new: str

    @property
    def name(self) -> str:
        """How equivalent.txt names it: it holds as long as the line does, wherever that lies in the file."""
        return f"{self.path}: {self.old} -> {self.new}"

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{_key(self.spec)}:{self.name}".encode()).hexdigest()[:32]


class Bench:
    """A copy of the tree to mutate, and what is known so far in the folder `state`."""

    def __init__(self, state: Path) -> None:
        self.state, self.copy = state, state / "copy"
        state.mkdir(parents=True, exist_ok=True)

    def refresh(self) -> None:
        """Make the copy like the tree."""
        if self.copy.exists():
            shutil.rmtree(self.copy)
        self.copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.copy / name)
        (self.copy / "coverage.ini").write_text(CONFIG)

    def pytest(self, *words: str, within_s: float | None = None) -> int | None:
        """pytest's exit code in the copy; None where it did not end within this time."""
        environ = {
            **os.environ,
            "PYTHONPATH": str(self.copy),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            *words,
        ]
        with subprocess.Popen(
            argv,
            cwd=self.copy,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as child:
            try:
                return child.wait(within_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)

    # --- which test executes what ---

    @property
    def data_file(self) -> Path:
        return self.state / "coverage"

    def map(self, tests: list[str]) -> int:
        """Run the tests once and add what they execute."""
        self.refresh()
        spent = self.state / f"times-{len([*self.state.glob('times-*')])}.xml"
        words = ["--cov=fsbarrier", "--cov=phases", "--cov-context=test", "--cov-report=", "--cov-append"]
        os.environ["COVERAGE_FILE"] = str(self.data_file)
        code = self.pytest(
            *words,
            "--cov-config=coverage.ini",
            f"--junitxml={spent}",
            "-m",
            "not slow and not engine",
            *tests,
        )
        os.environ.pop("COVERAGE_FILE")
        return code or 0

    @cached_property
    def seconds(self) -> dict[str, float]:
        """How long each passed test took, by its name."""
        found = {}
        for file in sorted(self.state.glob("times-*.xml")):
            for case in ElementTree.parse(file).iter("testcase"):
                if not [*case]:
                    module = case.attrib["classname"].replace(".", "/")
                    found[f"{module}.py::{case.attrib['name']}"] = float(case.attrib["time"])
        return found

    @cached_property
    def executes(self) -> coverage.CoverageData:
        data = coverage.CoverageData(basename=str(self.data_file))
        data.read()
        return data

    def tests_of(self, change: Change) -> list[str]:
        """The passing tests that execute one of the changed lines, the quickest first."""
        contexts: set[str] = set()
        by_line = self.executes.contexts_by_lineno(change.path)
        for line in range(change.spec.start_pos[0], change.spec.end_pos[0] + 1):
            contexts |= set(by_line.get(line, ()))
        if contexts == {""}:
            # It runs when the module is imported, for whoever uses what the module defines.
            names = self._passed(context for of_line in by_line.values() for context in of_line)
            return sorted(names, key=self.seconds.__getitem__)[:OF_A_MODULE]
        return sorted(self._passed(contexts), key=self.seconds.__getitem__)

    def _passed(self, contexts: Iterable[str]) -> set[str]:
        return {context.partition("|")[0] for context in contexts} & self.seconds.keys()

    # --- mutants ---

    def judge(self, change: Change) -> WorkResult:
        """Whether one of its tests notices the mutant."""
        tests = self.tests_of(change)
        if not tests:
            return WorkResult(worker_outcome=WorkerOutcome.NO_TEST, diff=change.name)
        path, chosen = self.copy / change.path, self.copy / "chosen.txt"
        original = path.read_text()
        mutated = mutate_code(original, _operator(change.spec), change.spec.occurrence)
        chosen.write_text("\n".join(tests) + "\n")
        within_s = LEAST_S + PATIENCE * sum(self.seconds[name] for name in tests)
        try:
            path.write_text(mutated)
            code = self.pytest("-x", f"--timeout={within_s:.0f}", f"@{chosen}", within_s=within_s)
        finally:
            path.write_text(original)
        outcome = TestOutcome.SURVIVED if code == 0 else TestOutcome.KILLED
        return WorkResult(worker_outcome=WorkerOutcome.NORMAL, test_outcome=outcome, diff=change.name)

    def run(self, room: str, sample: int) -> None:
        """Judge the drawn mutants of a room that have no verdict yet."""
        drawn = self.drawn(room, sample)
        db = WorkDB(str(self.state / f"{room.replace('/', '-')}.sqlite"), WorkDB.Mode.create)
        try:
            known = {item.job_id for item in db.work_items}
            db.add_work_items(
                WorkItem.single(job_id=change.key, mutation=change.spec)
                for change in drawn
                if change.key not in known
            )
            done = {job for job, _ in db.results}
            for number, change in enumerate(drawn, 1):
                if change.key in done:
                    continue
                result = self.judge(change)
                db.set_result(change.key, result)
                print(f"{room} {number}/{len(drawn)} {_verdict(result)}: {change.name}", flush=True)
        finally:
            db.close()

    def drawn(self, room: str, sample: int) -> list[Change]:
        """So many mutants of a room, a folder or a module of fsbarrier/; always the same ones while the code stays."""
        place = ROOT / "fsbarrier" / room
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        specs = [
            spec for path in files for spec in specs_of(path.relative_to(ROOT).as_posix(), path.read_text())
        ]
        specs.sort(key=_key)
        return [*islice(filter(None, map(change_of, specs)), sample)]


def specs_of(path: str, source: str) -> Iterator[MutationSpec]:
    """Where cosmic-ray's operators would change a file."""
    nodes = [*ast_nodes(get_ast(source))]
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue
        operator = operator_class()
        positions = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(positions):
            yield MutationSpec(path, name, occurrence, start, end)


def change_of(spec: MutationSpec) -> Change | None:
    """The mutant; None if it changes nothing that is executed, or is no Python."""
    source = (ROOT / spec.module_path).read_text()
    mutated = mutate_code(source, _operator(spec), spec.occurrence)
    if mutated is None or _program(mutated) in ("", _program(source)):
        return None
    (first, _), (last, _) = spec.start_pos, spec.end_pos
    lines, changed = source.splitlines(), mutated.splitlines()
    behind = len(lines) - last
    old, new = lines[first - 1 : last], changed[first - 1 : len(changed) - behind]
    return Change(
        str(spec.module_path), spec, *(" ".join(line.strip() for line in part) for part in (old, new))
    )


def _key(spec: MutationSpec) -> str:
    place = f"{spec.module_path}:{spec.operator_name}:{spec.occurrence}"
    return hashlib.sha256(place.encode()).hexdigest()


def _operator(spec: MutationSpec) -> object:
    return get_operator(spec.operator_name)(**spec.operator_args)


SAME_AS: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Is: ast.Eq, ast.IsNot: ast.NotEq}


def _program(source: str) -> str:
    """The program without the annotations that nothing executes, and with `is` as `==`, which no test tells apart where it compares with
    None, a type or a member of an enumeration; "" where it is no program, or compares with a text by `is`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            tree = ast.parse(source)
            compile(tree, "mutant", "exec")
        except (SyntaxError, SyntaxWarning):
            return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            node.ops = [SAME_AS.get(type(op), type(op))() for op in node.ops]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            for inner in ast.walk(node):
                if isinstance(inner, ast.AnnAssign):
                    inner.annotation = ast.Constant(None)
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.dump(tree)


# --- what is told --------------------------------------------------------------------------------------------------------------------


def equivalents() -> dict[str, str]:
    """The reasons in equivalent.txt, by the mutants' names: a mutant on one line, and its reason indented below it."""
    found: dict[str, str] = {}
    name = ""
    for line in EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else ():
        if line.startswith(" ") and name:
            found[name] = f"{found.get(name, '')} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            name = line
    return found


def _verdict(result: WorkResult) -> str:
    if result.worker_outcome == WorkerOutcome.NO_TEST:
        return "not executed"
    if result.test_outcome == TestOutcome.KILLED:
        return "killed"
    return "equivalent" if str(result.diff) in equivalents() else "SURVIVES"


def report(state: Path, rooms: Iterable[str]) -> None:
    """Print a row of docs/proof.md for each room, and then each mutant that survives."""
    survivors: list[str] = []
    for file in sorted(state.glob("*.sqlite")):
        room = file.stem
        if rooms and room not in rooms:
            continue
        db = WorkDB(str(file), WorkDB.Mode.open)
        results = [result for _, result in db.results]
        db.close()
        count = Counter(map(_verdict, results))
        judged = count["killed"] + count["SURVIVES"]
        share = f"{100 * count['killed'] / judged:.0f} %" if judged else "-"
        columns = (
            len(results),
            count["killed"],
            count["equivalent"],
            count["SURVIVES"],
            share,
            count["not executed"],
        )
        print(f"| `{room}` | {' | '.join(map(str, columns))} |")
        survivors += [f"{room}: {result.diff}" for result in results if _verdict(result) == "SURVIVES"]
    print("\n".join(survivors))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--state", type=Path, default=ROOT / ".cache" / "mutation", help="what is known so far"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map", help="run tests once, to learn what they execute")
    mapping.add_argument("tests", nargs="+")
    running = commands.add_parser("run", help="judge mutants of rooms")
    running.add_argument("rooms", nargs="+")
    running.add_argument("--sample", type=int, default=300, help="mutants a room (default 300)")
    telling = commands.add_parser("report", help="print what is known")
    telling.add_argument("rooms", nargs="*")
    arguments = parser.parse_args()
    bench = Bench(arguments.state)
    if arguments.command == "map":
        return bench.map(arguments.tests)
    if arguments.command == "run":
        bench.refresh()
        for room in arguments.rooms:
            bench.run(room, arguments.sample)
    else:
        report(arguments.state, arguments.rooms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
