"""Puts a deliberate fault into the source: finds the function wherever it lies, and the code in it whatever its layout.

scripts/lab/faults.txt holds the faults, one block each:

    @ Situation.joiners: I14, only nodes of one code become members
    - not self.differs(join)
    + True
    ? unreadable placement

`@` names the function (its class before it; `<module>` for what stands in none; with a file's name before a slash where two files have
the same function and code), the invariant of docs/protocol.md that the fault breaks, and the promise. `-` and `+` are what is there and
what is put in its place: an expression, some elements of a list or operands of an `and`, an argument with its name, an `except` clause,
or whole statements. They are compared as syntax trees, so comments, line breaks and the file's name do not matter. `?` names the tests
(tests/test_unreadable.py …) that come after the schedules; without it mutants.py takes those of the protocol. A block may have further
`@` lines, without a promise, for faults that need two places.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("faults.txt")
SOURCES = ("fsbarrier", "phases")


class DoesNotApply(Exception):
    """The code that a fault is meant for is not there, or is there twice."""


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` in the function `where`."""

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One fault, at a `line` of the table. `tests`: the names of those that are about it, without `test_`."""

    line: int
    promise: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.line} {self.edits[0].where}: {self.promise}"


# --- reading the table ----------------------------------------------------------------------------------------------------------


def read_table(path: Path = TABLE) -> list[Mutant]:
    """All mutants, in the order of the table. Raises ValueError for a block that cannot be understood."""
    found: list[Mutant] = []
    block: list[tuple[int, str]] = []
    for number, line in [*enumerate(path.read_text().splitlines(), start=1), (0, "")]:
        if line.strip():
            block.append((number, line))
        elif block:
            if not block[0][1].startswith("#"):
                found.append(_read_block(path, block))
            block = []
    return found


def _read_block(path: Path, block: Sequence[tuple[int, str]]) -> Mutant:
    edits: list[tuple[str, list[str], list[str]]] = []
    promise, tests = "", ""
    for number, line in block:
        mark, text = line[:1], line[2:]
        if mark == "@":
            where, _, said = text.partition(": ")
            promise = promise or said
            edits.append((where, [], []))
        elif mark in "-+" and edits:
            _, old, new = edits[-1]
            (old if mark == "-" else new).append(text)
        elif mark == "?":
            tests = text
        else:
            raise ValueError(f"{path.name}, line {number}: not a line of a mutant: {line!r}")
    if not promise or any(not old for _, old, _ in edits):
        raise ValueError(f"{path.name}, line {block[0][0]}: a mutant needs a promise and what it replaces")
    made = tuple(Edit(where, "\n".join(old), "\n".join(new)) for where, old, new in edits)
    return Mutant(block[0][0], promise, made, tuple(tests.split()))


# --- finding a function ---------------------------------------------------------------------------------------------------------


@cache
def _functions(root: Path) -> dict[str, list[Path]]:
    """In which files there is a function or class of each qualified name."""
    found: dict[str, list[Path]] = {}
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        for name in {name for name, _ in _named(_parsed(path))}:
            found.setdefault(name, []).append(path)
    return found


def _named(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    if not prefix:
        yield "<module>", tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from _named(node, f"{prefix}{node.name}.")


def mutate(mutant: Mutant, root: Path = ROOT) -> dict[Path, str]:
    """The files that the fault changes, with their new text. Raises DoesNotApply."""
    trees: dict[Path, ast.Module] = {}
    for edit in mutant.edits:
        path, _ = _find(mutant, edit, _parsed, root)
        trees.setdefault(path, ast.parse(path.read_text()))
        _find(mutant, edit, lambda path: trees.get(path) or _parsed(path), root)[1].replace()
    return {path: ast.unparse(tree) + "\n" for path, tree in trees.items()}


def check(mutant: Mutant, root: Path = ROOT) -> None:
    """Raises DoesNotApply for a fault that cannot be put in."""
    for edit in mutant.edits:
        _find(mutant, edit, _parsed, root)


def _find(mutant: Mutant, edit: Edit, parse: Callable[[Path], ast.Module], root: Path) -> tuple[Path, _Place]:
    """The file and the one place in it where the code of `edit` is."""
    stem, _, where = edit.where.rpartition("/")
    places = [
        (path, place)
        for path in _functions(root).get(where, ())
        if stem in ("", path.stem)
        for name, function in _named(parse(path))
        if name == where
        for place in _matches(function, edit)
    ]
    if len(places) != 1:
        there = "is not in" if not places else f"is {len(places)} times in"
        raise DoesNotApply(f"{mutant.name}\n  {edit.old!r} {there} {edit.where}")
    return places[0]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# --- finding the code in it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where the code lies: some items of a list (or the one node) in a field of its parent, and what comes there."""

    parent: ast.AST
    field: str
    at: slice | None
    new: Sequence[ast.AST]

    def replace(self) -> None:
        if self.at is None:
            setattr(self.parent, self.field, self.new[0])
        else:
            getattr(self.parent, self.field)[self.at] = self.new


def _matches(function: ast.AST, edit: Edit) -> list[_Place]:
    """Every place in a function where the code is."""
    found: list[_Place] = []
    for old, new in _readings(edit):
        wanted = [ast.dump(node) for node in old]
        for parent in ast.walk(function):
            for field, value in ast.iter_fields(parent):
                if isinstance(value, list):
                    for start in range(len(value) - len(old) + 1):
                        part = value[start : start + len(old)]
                        if _same(part, old, wanted):
                            found.append(_Place(parent, field, slice(start, start + len(old)), new))
                elif len(new) == 1 and _same([value], old, wanted):
                    found.append(_Place(parent, field, None, new))
        if found:
            break
    return found


def _same(found: Sequence[object], old: Sequence[ast.AST], wanted: Sequence[str]) -> bool:
    """Whether this is the code that is looked for, whose dumps are `wanted`. To compare types first saves nearly all of the time."""
    if [type(item) for item in found] != [type(item) for item in old]:
        return False
    return [ast.dump(cast(ast.AST, item)) for item in found] == wanted


def _readings(edit: Edit) -> Iterator[tuple[list[ast.AST], list[ast.AST]]]:
    """What the two texts may be, the likeliest reading first: a reading counts where both texts can be read so."""
    for read in (_expression, _elements, _statements, _handlers, _keywords):
        try:
            old, new = read(edit.old), read(edit.new)
        except (SyntaxError, ValueError):
            continue
        if old is not None and new is not None:
            yield old, new


def _expression(text: str) -> list[ast.AST] | None:
    return [ast.parse(text.strip(), mode="eval").body]


def _elements(text: str) -> list[ast.AST] | None:
    """Some elements of a list, or arguments of a call, or operands of one `and` or `or`."""
    if not text.strip():
        return []
    body = ast.parse(f"({text.strip()})", mode="eval").body
    if isinstance(body, ast.Tuple):
        return [*body.elts]
    return [*body.values] if isinstance(body, ast.BoolOp) else [body]


def _statements(text: str) -> list[ast.AST] | None:
    return [*ast.parse(text).body]


def _handlers(text: str) -> list[ast.AST] | None:
    return [*cast(ast.Try, ast.parse(f"try:\n    pass\n{text}").body[0]).handlers]


def _keywords(text: str) -> list[ast.AST] | None:
    call = cast(ast.Call, ast.parse(f"f({text})", mode="eval").body)
    return [*call.keywords] if call.keywords and not call.args else None
