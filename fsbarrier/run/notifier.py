"""Runs the user's `notify.command` for the important events of the run, with one JSON object an event.

The lowest living rank notifies for all, so that an event comes once; around a loss it may come twice. The command never blocks the node.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import threading
from collections.abc import Mapping
from pathlib import Path

from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.processes.supervisor import Child
from fsbarrier.protocol.state import Node
from fsbarrier.protocol.succession import STARTS
from fsbarrier.wording import without_passwords

#: a command that takes longer is killed
COMMAND_S = 60.0
#: how long the end of a node waits for its last notifications
LAST_S = 10.0
# Linux limits an environment variable to 128 KiB. If an event is too long, only its name is passed on.
MOST_BYTES = 100_000
# The event is in the command's standard input and in its environment.
_GIVE = 'printf "%s\\n" "$FSBARRIER_EVENT" | "$@"'
_NAMES = {"generation_started": "started", "evaluated": "evaluated", "node_lost": "node_lost"}

Fields = Mapping[str, object]


class Notifier:
    """`about` is part of every event: the run's id and directory."""

    def __init__(self, command: str, log_file: Path, about: Mapping[str, str]) -> None:
        self._argv, self._log_file, self._about = shlex.split(command), log_file, about
        self._lost: set[int] = set()
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._giving_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._thread.start()

    def tell(self, event: str, node: Node, fields: Fields) -> None:
        """Pass on an event of the journal, if it is an important one and this node notifies."""
        name = _NAMES.get(event)
        if event == "node_ended":
            name = str(fields.get("state"))
        if event == "node_lost":
            self._lost |= _ranks(fields.get("lost"))
        if event == "generation_started":
            self._lost = set()
            # Later generations of a session follow a loss or a joining node, and may be the first of this process.
            name = name if fields.get("reason") in STARTS else None
        generation = node.generation
        if (
            name is None
            or generation is None
            or node.rank != min(set(generation.ranks) - self._lost, default=-1)
        ):
            return
        message = {"event": name, **self._about, "node_rank": node.rank, **fields}
        text = without_passwords(json.dumps(message, default=str))
        if len(text) > MOST_BYTES:
            text = json.dumps({"event": name, **self._about, "node_rank": node.rank})
        self._waiting.put(text)

    def close(self) -> None:
        """Wait a little for the last notifications."""
        self._waiting.put(None)
        self._thread.join(LAST_S)
        self._giving_up.set()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None and not self._giving_up.is_set():
            # Its errors are in its log. They must not end the run.
            with contextlib.suppress(ProgramFailed, StoreError):
                child = Child.start(
                    ["sh", "-c", _GIVE, "notify", *self._argv],
                    env={**os.environ, "FSBARRIER_EVENT": event},
                    log_file=self._log_file,
                    name="notify",
                )
                try:
                    child.wait(COMMAND_S)
                finally:
                    child.stop(grace_s=1.0)


def _ranks(lost: object) -> set[int]:
    rows = lost if isinstance(lost, list | tuple) else ()
    return {
        row["node_rank"] for row in rows if isinstance(row, Mapping) and isinstance(row.get("node_rank"), int)
    }
