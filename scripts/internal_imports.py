"""How many test files import internals, rather than speak to commands, the public API and the core (CONTRIBUTING.md, "How to test it").

python scripts/internal_imports.py          the number
python scripts/internal_imports.py --list   and what each of them imports
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {"cli", "aggregate"}
# What docs/ name, and what programs and their users import.
PUBLIC = {
    "trajectories",
    "program",
    "node",
    "context",
    "specs",
    "decisions",
    "errors",
    "loader",
    "user_code",
} | {*("data.tasks", "data.examples", "rewards.kinds", "rollouts.agents")}
# Rules, tables and the laboratory; how things are called on disk.
CORE = {"protocol", "settings", "rundir.names", "rundir.paths"}


def imported(path: Path) -> Iterator[str]:
    """The modules of fsbarrier that a file imports anywhere, or names in a string to patch them, without `fsbarrier.`."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            names = [str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)]
        for name in names:
            if name.startswith("fsbarrier."):
                yield _module(name.split(".")[1:])


def _module(parts: list[str]) -> str:
    """The module in a dotted name that may end with names inside it."""
    folder = ROOT / "fsbarrier"
    while parts and not (
        folder.joinpath(*parts).is_dir() or folder.joinpath(*parts).with_suffix(".py").is_file()
    ):
        parts = parts[:-1]
    return ".".join(parts)


def is_internal(module: str) -> bool:
    inside = any(module == core or module.startswith(f"{core}.") for core in CORE)
    return bool(module) and not inside and module not in COMMANDS | PUBLIC


def main(flags: list[str]) -> None:
    files = {path: {*filter(is_internal, imported(path))} for path in sorted((ROOT / "tests").rglob("*.py"))}
    tests = {path: found for path, found in files.items() if path.name.startswith("test_")}
    if "--list" in flags:
        for path, found in files.items():
            print(f"{path.relative_to(ROOT)}: {', '.join(sorted(found)) or '-'}")
    counted = [sum(map(bool, some.values())) for some in (tests, files)]
    print(
        f"{counted[0]} of {len(tests)} test files import internals, "
        f"and {counted[1] - counted[0]} of {len(files) - len(tests)} files that help them"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
