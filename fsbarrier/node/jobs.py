"""Carries out the work that a program's table describes: one piece at a time, in a thread, cancellable at any moment.

The state machine asks (launch, cancel, report); what happens here never changes a node's state by itself. A worker program gets
a private spec file, writes its progress and its result beside it, and its output goes to the node's log.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fsbarrier import files
from fsbarrier.errors import FsbarrierError, ProgramFailed, StoreError
from fsbarrier.machine.rendezvous import listen, port_of, reachable
from fsbarrier.program import (
    Command,
    Context,
    OpenRendezvous,
    ProbeAddresses,
    PublishFile,
    PublishWeights,
    ReleaseEngine,
    ServeWeights,
    Steps,
    Value,
    Work,
)
from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.state import Node, Part, WorkReport
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.supervision.supervisor import Child
from fsbarrier.supervision.worker_files import read_progress, read_result

LOG_LINES = 20
T = TypeVar("T")
DIRECTORY_S = 15.0  # for how long a failing directory is asked for what a piece of work needs to know
CANCEL_S = 60.0  # more than ending a program takes that hangs in the kernel (supervisor.KILL_S)
WATCH_S = 0.25  # how often a running program's progress is looked at


class EngineLike(Protocol):
    """What work needs of the local engine (fsbarrier/engine/engine.py)."""

    threads: int

    def ensure(self, weights: Path, policy_version: int, *, cancel: threading.Event) -> Any: ...

    def release(self, *, cancel: threading.Event) -> Mapping[str, Any]: ...


class Unfit(StoreError):
    """This node cannot begin any work; another could."""


class Cancelled(Exception):
    """The work was called off; nobody waits for its report."""


@dataclass
class Jobs:
    """This node's worker. `context` builds what the table's functions see; `wake` is called when a piece of work ends."""

    context: Callable[[Node], Context]
    engine: EngineLike
    work_dir: Path
    log_dir: Path
    log_path: Path
    wake: Callable[[], None]
    stall_timeout_s: float
    grace_s: float = 2.0
    #: why no work can be done on this node, whatever the program: then it is the node that has failed
    unfit: StoreError | None = None
    _cancel: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _report: WorkReport | None = None
    _child: Child | None = None
    _progress_file: Path | None = None
    _progress: dict[str, Any] = field(default_factory=dict)
    _rendezvous: socket.socket | None = None
    _number: int = 0

    # --- the state machine's side (WorkRunner) ---

    def launch(self, node: Node, part: Part) -> None:
        """Begin `part` of the work of the row that `node` is in."""
        self.cancel()
        self._cancel, self._report, self._progress = threading.Event(), None, {}
        self._progress_file = None
        self._thread = threading.Thread(
            target=self._run, args=(node, part, self._cancel), name="work", daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        """End the work under way; returns when nothing of it is left. Raises StoreError where it cannot be ended."""
        thread = self._thread
        if thread is None:
            return
        self._cancel.set()
        self._thread = self._report = None
        thread.join(CANCEL_S)
        if thread.is_alive():
            raise StoreError(
                f"the work of this node does not end within {CANCEL_S:g} s; does {self.log_path} hang?"
            )

    def report(self) -> WorkReport | None:
        return self._report

    def progress(self) -> Payload:
        """What the running program says of itself; {} when none runs."""
        path = self._progress_file
        if path is not None and self._report is None:
            self._progress = read_progress(path) or self._progress
        return self._progress

    # --- the thread's side ---

    def _run(self, node: Node, part: Part, cancel: threading.Event) -> None:
        started = time.monotonic()
        try:
            context = self._patiently(partial(self.context, node), cancel)
            row = context.phase
            builder = row.each if part is Part.EACH else row.leader
            assert builder is not None
            work = self._patiently(partial(builder, context), cancel)
            value, ok = self._do(work, context, cancel), True
        except Cancelled:
            return
        except Unfit as error:
            self.unfit = error
            self.wake()
            return
        except FsbarrierError as error:
            value, ok = failure(str(error)), False
        except Exception as error:  # a bug in a user's program file, or ours: a failure like any other
            value, ok = failure(f"{type(error).__name__}: {error}"), False
        if not cancel.is_set():
            self._report = WorkReport(part, ok, value, time.monotonic() - started)
            self.wake()

    def _patiently(self, ask: Callable[[], T], cancel: threading.Event) -> T:
        """What the shared directory says. While it fails it is asked again: that is no failed attempt of a program."""
        deadline = time.monotonic() + DIRECTORY_S
        while True:
            try:
                return ask()
            except OSError:
                if time.monotonic() >= deadline:
                    raise
                if cancel.wait(WATCH_S):
                    raise Cancelled from None

    def _do(self, work: Work, context: Context, cancel: threading.Event) -> dict[str, Any]:
        if cancel.is_set():
            raise Cancelled
        match work:
            case Value(value):
                return dict(value)
            case Steps(works):
                merged: dict[str, Any] = {}
                for one in works:
                    value = self._do(one, context, cancel)
                    events = [*merged.get("events", ()), *value.get("events", ())]
                    merged |= value | ({"events": events} if events else {})
                return merged
            case ServeWeights(folder, version, threads):
                self.engine.threads = threads
                self._progress = {"note": f"engine: policy version {version}"}
                info = self.engine.ensure(folder, version, cancel=cancel)
                self._engine_info = {"url": info.url, "api_key": info.api_key, "model": info.model}
                fields = {
                    "engine_action": info.action,
                    "engine_s": round(info.seconds, 3),
                    "engine_note": info.note,
                }
                return {**fields, "events": [{"event": "engine_ready", "serving": version, **fields}]}
            case ReleaseEngine():
                return dict(self.engine.release(cancel=cancel))
            case OpenRendezvous(loopback):
                self._close_rendezvous()
                self._rendezvous = listen(loopback=loopback)
                return {"port": port_of(self._rendezvous)}
            case ProbeAddresses(addresses, port):
                return {"reached": reachable(addresses, port)}
            case PublishWeights():
                self._still_newest(context, cancel)
                return self._publish(work)
            case PublishFile(source, name):
                self._still_newest(context, cancel)
                files.link_or_copy(source, name)
                return {}
            case Command():
                return self._command(work, context, cancel)

    _engine_info: dict[str, Any] = field(default_factory=dict)

    def _still_newest(self, context: Context, cancel: threading.Event) -> None:
        """A node that slept while the others went on must not change what they see; nothing is left to report to them either."""
        if self._patiently(context.newest, cancel) > context.generation:
            raise ProgramFailed(
                f"generation {context.generation} has ended; nothing of it is published any more"
            )

    def _publish(self, work: PublishWeights) -> dict[str, Any]:
        checkpoints.verify(work.folder)
        checkpoints.publish_link(self.log_path, work.folder)
        checkpoints.retain(self.log_path, work.keep, work.folder)
        value = {"policy_version": work.policy_version, "folder": str(work.folder)}
        events = [journaled("weights_published", value)]
        gone = retention.remove_old(
            self.log_path, work.trained_on, batches=work.keep, trajectories=work.keep_trajectories
        )
        if gone:
            events.append({"event": "trajectories_removed", "iterations": gone})
        return {**value, "events": events}

    def _command(self, work: Command, context: Context, cancel: threading.Event) -> dict[str, Any]:
        self._close_rendezvous()  # torchrun takes the port over
        self._number += 1
        folder = self.work_dir / f"job-{self._number:05d}"
        spec_file, result_file, progress_file = (
            folder / "spec.json",
            folder / "result.json",
            folder / "progress.json",
        )
        engine = self._engine_info
        spec = {key: engine if value == "{engine}" else value for key, value in work.spec.items()}
        spec |= {"result": str(result_file), "progress": str(progress_file)}
        try:
            files.make_dirs(folder)
            files.write_atomic(spec_file, json.dumps(spec).encode())
        except OSError as error:
            raise Unfit(
                f"node {context.node_rank}: its temporary folder {self.work_dir} cannot be written to: {error.strerror}"
            ) from None
        argv = [word.replace("{spec}", str(spec_file)) for word in work.argv]
        self._progress_file = progress_file
        child = Child.start(
            argv,
            env=worker_env() | dict(work.env),
            log_file=self.log_dir / work.log,
            name=context.phase.name,
        )
        code = self._watch(child, progress_file, cancel, context)
        if code != 0:
            raise ProgramFailed(f"{program_name(argv)} {ended(code)}{tail_text(child)}")
        result = read_result(result_file, program_name(argv)) if work.result else {}
        shutil.rmtree(folder, ignore_errors=True)
        value = {**work.extra, **result}
        return {**value, "events": [journaled(work.event, value)]} if work.event else value

    def _watch(self, child: Child, progress_file: Path, cancel: threading.Event, context: Context) -> int:
        """Wait for the program's end, for as long as it shows signs of life."""
        seen, changed = 0, time.monotonic()
        while (code := child.wait(WATCH_S)) is None:
            if cancel.is_set():
                child.stop(self.grace_s)
                raise Cancelled
            stamp = _mtime(progress_file) + _mtime(child.log_file)
            if stamp != seen:
                seen, changed = stamp, time.monotonic()
            elif time.monotonic() - changed > self.stall_timeout_s:
                child.stop(self.grace_s)
                raise ProgramFailed(
                    f"no progress for {self.stall_timeout_s:g} s (coordination.stall_timeout_s); "
                    f"{context.phase.name} was ended{tail_text(child)}"
                )
        return code

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None


def worker_env() -> dict[str, str]:
    """This process's environment, with this very fsbarrier importable wherever the program runs."""
    package = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "")
    path = package if not inherited else os.pathsep.join((package, inherited))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def journaled(event: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """What of a result goes to the journal: its plain values."""
    plain = {k: v for k, v in value.items() if isinstance(v, (int, float, str)) or v is None}
    return {**plain, "event": event}


def failure(message: str) -> dict[str, Any]:
    """A failed fact's value: the first line as the error, the others as log lines."""
    first, *rest = message.splitlines() or ["failed"]
    return {"error": first, "log": rest[-LOG_LINES:]}


def tail_text(child: Child) -> str:
    return "".join(f"\n{line}" for line in (*child.tail(LOG_LINES), f"(from {child.log_file})"))


def program_name(argv: list[str]) -> str:
    """What people know a command by: `-m`'s last argument, else the file name."""
    modules = [argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "-m"]
    return modules[-1] if modules else Path(argv[0]).name


def ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
