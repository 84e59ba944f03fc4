"""Digests of this node's code, which all nodes compare when they start: fsbarrier's own sources, and the files that the settings name.

Only the content of a file counts, not its place: a wheel and a checkout of the same sources agree, and so do two copies of a reward. What a
named file imports does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from fsbarrier.loader import own_sources, program_path
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.value_types import reward_kinds
from fsbarrier.store.files import sha256_file

# The files of a trainer's command that count: its code and its configuration, not its data or programs.
COMMAND_FILES = frozenset({".py", ".sh", ".json", ".yaml", ".yml", ".toml"})


def code_digests(settings: Settings) -> dict[str, str]:
    """The digests by the setting that names the code; "fsbarrier" is our own code. Raises OSError."""
    agent, loss = settings.rollout.agent, settings.algorithm.loss
    command = [Path(word.rpartition("=")[2]) for word in shlex.split(settings.trainer.command or "")]
    named = {
        "fsbarrier": own_sources(),
        "program": _numbered([program_path(settings.program)]),
        "reward.kind": _code_in(reward_kinds(settings.reward.kind)),
        "rollout.agent": _code_in([agent] if agent else []),
        "algorithm.loss": _code_in([loss]),
        "trainer.command": _numbered(p for p in command if p.suffix in COMMAND_FILES and p.is_file()),
    }
    return {name: _digest(files) for name, files in named.items() if files}


def one_digest(code: Mapping[str, str]) -> str:
    """One digest of all code. All nodes of a run have the same one."""
    return hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()


def _code_in(values: Iterable[str]) -> dict[str, Path]:
    """The files in values like `path/file.py:name`. Built-in kinds have no file."""
    return _numbered(Path(value.rpartition(":")[0]) for value in values if ":" in value)


def _numbered(files: Iterable[Path]) -> dict[str, Path]:
    return {str(number): file for number, file in enumerate(files)}


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(os.fsencode(name) + b"\0" + bytes.fromhex(sha256_file(files[name])))
    return digest.hexdigest()
