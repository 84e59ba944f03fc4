"""What a launcher starts: one command, the same on every node; each node learns its rank from its environment."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from fsbarrier import files, reading
from fsbarrier.errors import UsageError
from fsbarrier.start import preflight

#: The first line of each file that a launcher writes. A file without it is somebody else's and is never written over.
MARK = "# Written by `fsbarrier launch`."


@dataclass(frozen=True, slots=True)
class Job:
    """`run`, `stop`: how these two commands begin on a node. `words`: what `run` is told on every node.

    `folder`: where a node is started; relative paths in `words` begin there.
    """

    name: str
    nodes: int
    gpus_per_node: int
    folder: Path
    log_path: str
    run: tuple[str, ...]
    stop: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What schedulers that start containers want to know. `volume`: the shared storage, `mount`: where the nodes see it."""

    image: str
    volume: str
    mount: str


def commands_here(chosen: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How `fsbarrier run` and `fsbarrier stop` begin on a node that shares this machine's files.

    `chosen` is the `fsbarrier` that the user named; else it is the clone's (run.sh makes its environment first), else this Python's.
    Raises UsageError.
    """
    clone = preflight.checkout()
    if chosen is None and clone is not None and (clone / "run.sh").is_file():
        stop: tuple[str, ...] = (str(clone / ".venv" / "bin" / "fsbarrier"), "stop")
        if os.environ.get("FSBARRIER_VENV"):
            # This environment is not the clone's own. It finds the clone's code only through PYTHONPATH.
            stop = ("env", f"PYTHONPATH={clone}", sys.executable, "-P", "-m", "fsbarrier", "stop")
        return (str(clone / "run.sh"),), stop
    fsbarrier = [sys.executable, "-P", "-m", "fsbarrier"] if chosen is None else split("--fsbarrier", chosen)
    return (*fsbarrier, "run"), (*fsbarrier, "stop")


def split(flag: str, text: str) -> list[str]:
    """The words of a command as a shell would see them. Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from None
    if not words:
        raise UsageError(f"{flag}: a command is needed")
    return words


def check_name(name: str) -> str:
    """A name that every scheduler takes: that of a DNS label. Raises UsageError."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name):
        raise UsageError(
            f"--name {name}: lower-case letters, digits and hyphens, at most 50, a letter first and no hyphen last"
        )
    return name


def check_below_mount(job: Job, machine: Machine) -> None:
    """In a container only what lies on the shared volume is there again after a restart. Raises UsageError."""
    if Path(machine.mount) not in Path(job.log_path).parents:
        raise UsageError(
            f"--log-path {job.log_path}: must lie below {machine.mount}, where the nodes see the shared volume {machine.volume}"
        )


def quoted(text: str) -> str:
    """A YAML scalar for any text: JSON's strings are YAML's, too."""
    return json.dumps(text)


def write(path: Path, text: str) -> None:
    """Write a launcher's file, over an older one of ours; only its owner can read it. Raises UsageError."""
    try:
        reading.check_may_replace(path)
        if path.exists() and MARK.encode() not in reading.read_bytes(path, reading.JSON_BYTES)[:500]:
            raise UsageError(
                f"--output {path}: there is a file that fsbarrier did not write; choose another name"
            )
        files.write_atomic(path, os.fsencode(text))
    except OSError as error:
        raise UsageError(f"--output {path}: cannot be written: {error.strerror}") from None
