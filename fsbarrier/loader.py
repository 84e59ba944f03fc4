"""Loads a program by name (rl, toy, ping) or by path (./mine.py). Programs are files, not packages: people copy and edit them."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from fsbarrier.errors import UsageError
from fsbarrier.program import Program


def program_folder() -> Path:
    """Where the programs that come with fsbarrier are: inside an installed wheel, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed, checkout = package / "phases", package.parent / "phases"
    if not installed.is_dir() and (package.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    return installed


def program_path(name: str) -> Path:
    """The file of a program. Raises UsageError when there is none."""
    if name.endswith(".py"):
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise UsageError(f"--program {name}: there is no such file")
        return path
    path = program_folder() / f"{name}.py"
    if not name.isidentifier() or not path.is_file():
        known = ", ".join(sorted(p.stem for p in program_folder().glob("*.py")))
        raise UsageError(
            f"--program {name}: no such program; there are {known}, or give the path of a .py file"
        )
    return path


def load_program(name: str) -> Program:
    """The program called `name`: its file's PROGRAM. Raises UsageError for a file that does not define one."""
    program = getattr(load_module(name), "PROGRAM", None)
    if not isinstance(program, Program):
        path = program_path(name)
        raise UsageError(f"--program {name}: {path} defines no PROGRAM (a fsbarrier.program.Program)")
    return program


def load_module(name: str) -> ModuleType:
    """The file of program `name` as a module, for a program that is derived from another. Raises UsageError."""
    path = program_path(name)
    try:
        return load_file(path, f"fsbarrier_program_{path.stem}")
    except UsageError:
        raise
    # Whatever the user's file raises, the user sees it in one line.
    except Exception as error:
        raise UsageError(
            f"--program {name}: {path} cannot be loaded: {type(error).__name__}: {error}"
        ) from None


def own_sources() -> dict[str, Path]:
    """fsbarrier's own sources and the programs that come with it.

    Their names are relative to the package, so that a wheel and a checkout of the same sources agree.
    """
    package, programs = Path(__file__).resolve().parent, program_folder()
    sources = {f"programs/{path.name}": path for path in programs.glob("*.py")}
    for path in package.rglob("*.py"):
        if path.parent != programs:
            sources[path.relative_to(package).as_posix()] = path
    return sources


class _LeavesNothing(SourceFileLoader):
    """Writes no __pycache__ beside other people's files."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        pass


def load_file(path: Path, name: str) -> ModuleType:
    """A Python file of the user's as a module called `name`. Raises whatever running it raises."""
    loader = _LeavesNothing(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
