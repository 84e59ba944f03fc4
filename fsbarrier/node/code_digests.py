"""Digests of this node's code, which all nodes compare when they start.

Only the content of a file counts, not its place: a wheel and a checkout of the same sources agree, and so do two copies of a reward.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import json
import os
import shlex
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from fsbarrier import reading
from fsbarrier.errors import UsageError
from fsbarrier.loader import own_sources, program_path
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.value_types import reward_kinds

# Of a longer file (weights, or data of a trainer's command) the digest covers the length, the beginning and samples of the rest.
WHOLE_BYTES = 16 * reading.MIB
SAMPLES, SAMPLE_BYTES = 64, 64 * 1024
# Limits for the files of a model or a package, since links in it may lead to a whole disk.
MOST_FILES, MOST_BYTES = 100_000, 64 * reading.GIB
# The suffixes of modules: source and compiled.
MODULES = tuple(importlib.machinery.all_suffixes())
# Where packages are installed. Nodes compare their versions, not their files.
INSTALLED = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
# The name of the model's digest. node/admission.py compares models, with everything else that must fit together.
MODEL = "model"


def code_digests(settings: Settings, model: Path | None) -> dict[str, str]:
    """The digests by the setting that names the code; "fsbarrier" is our own code. Raises UsageError, OSError."""
    named = {
        "fsbarrier": own_sources(),
        "program": _local_sources(program_path(settings.program)),
        "reward.kind": _named_code(reward_kinds(settings.reward.kind)),
        "rollout.agent": _named_code([settings.rollout.agent] if settings.rollout.agent else []),
        "trainer.command": _files_of_command(settings.trainer.command),
        "trainer.deepspeed": _one_file(settings.trainer.deepspeed),
        MODEL: _files_below(model) if model is not None else {},
    }
    return {name: _digest(files) for name, files in named.items() if files}


def one_digest(code: Mapping[str, str]) -> str:
    """One digest of all code except the model. All nodes of a run have the same one."""
    compared = {name: digest for name, digest in code.items() if name != MODEL}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(os.fsencode(name) + b"\0" + _content_digest(files[name]))
    return digest.hexdigest()


def _content_digest(path: Path) -> bytes:
    """The digest of a file; of a long one, of its length, its beginning and 64 samples spread evenly over the rest.

    In a safetensors file the beginning includes the whole header: names, shapes, types and offsets of the tensors.
    """
    with reading.open_stream(path, links=True) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE_BYTES:
            return hashlib.sha256(stream.read(WHOLE_BYTES)).digest()
        header = int.from_bytes(stream.read(8), "little") if path.suffix == ".safetensors" else 0
        beginning = min(max(header, SAMPLE_BYTES), reading.TENSOR_HEADER_BYTES)
        digest = hashlib.sha256(b"%d %s" % (size, stream.read(beginning)))
        for number in range(1, SAMPLES + 1):
            stream.seek(max(0, size * number // SAMPLES - SAMPLE_BYTES))
            digest.update(stream.read(SAMPLE_BYTES))
        return digest.digest()


# --- which files ----------------------------------------------------------------------------------------------------------


def _named_code(values: Iterable[str]) -> dict[str, Path]:
    """The files in values like `path/file.py:name`, with the modules that they import from their folders. Built-in kinds have no file."""
    files = [Path(value.rpartition(":")[0]) for value in values if ":" in value]
    return {
        f"{number} {name}": path
        for number, file in enumerate(files)
        for name, path in _local_sources(file).items()
    }


def _files_of_command(command: str | None) -> dict[str, Path]:
    """The files that a command names, Python files with the modules that they import from their folders; no machine code."""
    found = dict[str, Path]()
    for number, word in enumerate(shlex.split(command or "")):
        path = Path(word.rpartition("=")[2])
        if _is_plain(path) and not _is_machine_code(path):
            local = _local_sources(path) if path.suffix == ".py" else {path.name: path}
            found |= {f"{number} {name}": each for name, each in local.items()}
    return found


def _one_file(named: str | None) -> dict[str, Path]:
    return {"": Path(named)} if named else {}


def _files_below(folder: Path) -> dict[str, Path]:
    """All files below a folder, following links, except hidden ones. Raises UsageError."""
    found, known, todo, total = dict[str, Path](), set[tuple[int, int]](), [folder], 0
    while todo:
        path = todo.pop()
        with contextlib.suppress(OSError), os.scandir(path) as there:
            status = path.stat()
            # A link may form a cycle.
            if (place := (status.st_dev, status.st_ino)) in known:
                continue
            known.add(place)
            inner = sorted(Path(one) for one in islice(there, MOST_FILES) if not one.name.startswith("."))
            # Sorted, so that all nodes reach the target of several links by the same path.
            todo += [one for one in reversed(inner) if one.is_dir()]
            files = [one for one in inner if _is_plain(one)]
            found |= {file.relative_to(folder).as_posix(): file for file in files}
            total += sum(min(file.stat().st_size, WHOLE_BYTES) for file in files)
        if len(known) + len(found) > MOST_FILES or total > MOST_BYTES:
            raise UsageError(
                f"{folder}: with what its links lead to it has more than {MOST_FILES} files and folders, or {MOST_BYTES // reading.GIB} "
                "GiB of small files; name a folder of its own"
            )
    return found


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _is_machine_code(path: Path) -> bool:
    with reading.open_stream(path, links=True) as stream:
        return stream.read(4) == b"\x7fELF"


# --- what a Python file imports from its own folder -------------------------------------------------------------------------


def _local_sources(file: Path) -> dict[str, Path]:
    """A file and the modules in its folder that it imports, directly or indirectly; of a package, all modules."""
    folder, found, todo = file.parent, dict[str, Path](), [file]
    while todo:
        path = todo.pop()
        name = path.relative_to(folder).as_posix() if path != file else ""
        if name not in found:
            found[name] = path
            # The file itself may have any name.
            if path == file or path.suffix == ".py":
                for module in _imported(path):
                    todo += _beside(folder, module)
    return found


def _imported(path: Path) -> Iterator[str]:
    """The dotted names that a file imports anywhere."""
    try:
        tree = ast.parse(reading.read_bytes(path, WHOLE_BYTES, links=True))
    except (SyntaxError, ValueError, RecursionError):
        # Not valid Python. Importing it will fail with a message.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _beside(folder: Path, module: str) -> list[Path]:
    """The files of a module in `folder`; none if it comes from elsewhere."""
    first, *_ = module.split(".")
    if first == "fsbarrier" or str(folder) in INSTALLED:
        return []
    if _is_plain(folder / first / "__init__.py"):
        below = _files_below(folder / first).items()
        return [path for name, path in below if name.endswith(MODULES) and "__pycache__" not in name]
    stems = (folder / first, folder.joinpath(*module.split(".")))
    named = (stem.with_name(stem.name + suffix) for stem in stems for suffix in MODULES)
    return [path for path in named if _is_plain(path)]
