"""Loads a program by name (rl, sft, toy, ping) or by path (./mine.py). Programs are single files, so that users can copy and edit them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from fsbarrier.errors import UsageError
from fsbarrier.program import Program


def program_folder() -> Path:
    """The folder of the built-in programs: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed, checkout = package / "phases", package.parent / "phases"
    if not installed.is_dir() and (package.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    return installed


def program_path(name: str) -> Path:
    """The file of a program. Raises UsageError if it does not exist."""
    if name.endswith(".py"):
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise UsageError(f"--program {name}: no such file")
        return path
    path = program_folder() / f"{name}.py"
    if not name.isidentifier() or not path.is_file():
        known = ", ".join(sorted(p.stem for p in program_folder().glob("*.py")))
        if not known:
            raise UsageError(
                f"--program {name}: fsbarrier's own programs are missing: there is no folder {path.parent}. Install fsbarrier, or copy "
                "the whole clone with its pyproject.toml"
            )
        raise UsageError(f"--program {name}: no such program; use {known}, or the path of a .py file")
    return path


def load_program(name: str) -> Program:
    """The PROGRAM defined in the file of `name`. Raises UsageError if the file defines none."""
    program = getattr(load_module(name), "PROGRAM", None)
    if not isinstance(program, Program):
        path = program_path(name)
        raise UsageError(f"--program {name}: {path} does not define PROGRAM (a fsbarrier.program.Program)")
    return program


def load_module(name: str) -> ModuleType:
    """The file of program `name` as a module, for programs derived from it. Raises UsageError."""
    path = program_path(name)
    try:
        # A user's program may import the files beside it; a built-in program's module name must not shadow another module.
        return load_file(path) if name.endswith(".py") else load_file(path, f"fsbarrier_program_{path.stem}")
    except UsageError:
        raise
    # Report any exception from the user's file as one line.
    except (Exception, SystemExit) as error:
        raise UsageError(f"--program {name}: cannot load {path}: {failure(error, str(path))[0]}") from None


def own_sources() -> dict[str, Path]:
    """The sources of fsbarrier and of its built-in programs.

    Names are relative to the package, so that a wheel and a checkout of the same sources agree.
    """
    package, programs = Path(__file__).resolve().parent, program_folder()
    sources = {f"programs/{path.name}": path for path in programs.glob("*.py")}
    for path in package.rglob("*.py"):
        if path.parent != programs:
            sources[path.relative_to(package).as_posix()] = path
    return sources


class _LeavesNothing(SourceFileLoader):
    """Loads a source file without writing __pycache__ next to it."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        pass


def load_file(path: Path, name: str | None = None) -> ModuleType:
    """Import a user's Python file; it is executed again only if it has changed. Raises whatever the file raises.

    It behaves as if imported: it may import files beside it and in the current directory, and Python finds it in `sys.modules`, which
    dataclasses, pydantic, pickle and multiprocessing need. `name`: the module's name, for a file that need not be importable.
    """
    path = path.resolve()
    if name is None:
        # Appended, so that a user's random.py does not shadow a library's.
        sys.path += [folder for folder in (str(path.parent), os.getcwd()) if folder not in sys.path]
        name = _module_name(path)
    version = _version(path)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__fsbarrier_version__", None) == version:
        return known
    loader = _LeavesNothing(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    module.__dict__["__fsbarrier_version__"] = version
    return sys.modules.get(name, module)


def _version(path: Path) -> tuple[str, int, int]:
    """A value that differs if the file has changed since it was executed."""
    there = path.stat()
    return str(path), there.st_mtime_ns, there.st_size


def _module_name(path: Path) -> str:
    """The module name under which `import` finds the file, so that spawned multiprocessing children find it too. If another module has
    that name, the file gets a unique name."""
    owner = sys.modules.get(path.stem)
    if owner is not None:
        file = getattr(owner, "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(path.stem) if "." not in path.stem else None
        except (ImportError, ValueError):
            spec = None
        file = spec.origin if spec is not None else str(path)
    if "." not in path.stem and file is not None and Path(file).resolve() == path:
        return path.stem
    return f"{path.stem.replace('.', '_')}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def failure(error: BaseException, file: str | None) -> tuple[str, str, str]:
    """An exception from user code: its description with the location, the location, and the full traceback.

    The location is the innermost line in the user's `file`, or else in any file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    # The message of a syntax error already contains its location.
    own = own or ([] if isinstance(error, SyntaxError) else frames)
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}", place, "".join(traceback.format_exception(error))
