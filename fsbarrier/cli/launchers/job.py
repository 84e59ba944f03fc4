"""The job that a launcher starts: the same command on every node. Nodes take their rank from the environment."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.store import reading

#: The first line of each generated file. A file without it is not ours and is never overwritten.
MARK = "# Written by `fsbarrier launch`."
#: The last line of each generated file has a digest of the lines above it, so that a change made by hand is noticed.
_SEAL = b"# digest "
DSTACKS_NAME = 41


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """`run`, `stop`: the beginning of these commands on a node. `words`: the arguments of `run`, the same on every node.

    `folder`: the working directory, to which relative paths in `words` refer.
    """

    name: str
    nodes: int
    gpus_per_node: int
    folder: Path
    log_path: str
    run: tuple[str, ...]
    stop: tuple[str, ...]
    words: tuple[str, ...]
    #: names of variables whose values the nodes need
    env: tuple[str, ...] = ()


def commands_here(chosen: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The beginning of `fsbarrier run` and `fsbarrier stop` on a node that shares this machine's files.

    Uses `chosen` if the user gave a command, else the clone's run.sh (which creates its environment first), else this Python.
    Raises UsageError.
    """
    clone = preflight.checkout()
    if chosen is None and clone is not None and (clone / "run.sh").is_file():
        stop: tuple[str, ...] = (str(clone / ".venv" / "bin" / "fsbarrier"), "stop")
        if os.environ.get("FSBARRIER_VENV"):
            # This is not the clone's own environment, so it finds the clone's code only through PYTHONPATH.
            stop = ("env", f"PYTHONPATH={clone}", sys.executable, "-P", "-m", "fsbarrier", "stop")
        return (str(clone / "run.sh"),), stop
    fsbarrier = [sys.executable, "-P", "-m", "fsbarrier"] if chosen is None else split("--fsbarrier", chosen)
    return (*fsbarrier, "run"), (*fsbarrier, "stop")


def split(flag: str, text: str) -> list[str]:
    """Split a command into words like a shell. Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from None
    if not words:
        raise UsageError(f"{flag}: must not be empty; give a command")
    return words


def check_name(name: str, place: str) -> str:
    """Check that the scheduler accepts the name, i.e. that it is a DNS label. Raises UsageError."""
    if place == "dstack" and not 2 <= len(name) <= DSTACKS_NAME:
        raise UsageError(f"--name {name}: dstack takes names of 2 to {DSTACKS_NAME} characters")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name):
        raise UsageError(
            f"--name {name}: use at most 50 lower-case letters, digits and hyphens, starting with a letter and not ending with a hyphen"
        )
    return name


def check_below_mount(job: ClusterJob, mount: str, volume: str) -> None:
    """Check that the run directory is on the shared volume: other files do not survive a container restart. Raises UsageError."""
    if Path(mount) not in Path(job.log_path).parents:
        raise UsageError(
            f"--log-path {job.log_path}: must be below {mount}, the mount point of the shared volume {volume}"
        )


def fill(template: str, job: ClusterJob, **values: object) -> str:
    """The text of a scheduler's file. `template`: its name in this folder; `values`: what it needs besides the job."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(yaml=_yaml_scalar, shell=_shell_words)
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(mark=MARK, job=job, **values)


def _yaml_scalar(text: str) -> str:
    """A YAML scalar for any text: a JSON string, but with one escape for a character that JSON writes as two."""
    whole = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in whole)


def _shell_words(words: str | Sequence[str]) -> str:
    return shlex.join([words] if isinstance(words, str) else words)


def sealed(text: str) -> bytes:
    """The content of a generated file: the text, and the line with its digest."""
    data = os.fsencode(text)
    return data + _SEAL + hashlib.sha256(data).hexdigest()[:16].encode() + b"\n"


def is_foreign(path: Path) -> str:
    """Why the file at `path` must not be replaced, in words; "" if it is as `fsbarrier launch` wrote it, or there is none."""
    if path.is_symlink() or not path.is_file():
        return ""
    try:
        data = reading.read_bytes(path, reading.JSON_BYTES)
    except OSError:
        data = b""
    if MARK.encode() not in data[:500]:
        return "was not written by fsbarrier"
    text, _, _ = data.rpartition(_SEAL)
    return "" if sealed(os.fsdecode(text)) == data else "was changed by hand since fsbarrier wrote it"
