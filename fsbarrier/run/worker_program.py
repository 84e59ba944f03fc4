"""Starts the program that a row asks for, ends it if it hangs, and reads its result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.context import Context
from fsbarrier.engine.placement import visible
from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.network.listening import LISTENING
from fsbarrier.node import Weights
from fsbarrier.processes import failure_reason
from fsbarrier.processes.kept_program import KeptProgram
from fsbarrier.processes.signals import write_stacks
from fsbarrier.processes.supervisor import Child, own_program, with_this_package
from fsbarrier.processes.worker_contract import NOT_PERMITTED, WorkerFiles, read_result
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.run.job import Cancelled, NodeUnfit, RowJob, Workplace
from fsbarrier.run.weights import InFlight
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.secrecy import without_secrets, without_trackers_keys
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import HELPER, SPEC, Launch, Resident
from fsbarrier.store.files import discard
from fsbarrier.store.retry import patiently

# How often to check for cancellation and for a sign of life.
WATCH_S = 0.25
UPDATE = "fsbarrier.workers.update"
NO_SECRETS = ("fsbarrier.aggregate", "fsbarrier.workers.prepare", "fsbarrier.workers.examples", UPDATE)


class DirectoryFailed(ProgramFailed):
    """The program ended, or could not be started, because the shared directory fails."""


@dataclass(frozen=True)
class ProgramRun:
    """One program of a row, from its start to its end. `in_flight`, `calls_engines`: as in `Node.run`."""

    launch: Launch
    #: the program's own part of its spec; the run's settings and the paths of its files are added
    spec: Payload
    context: Context
    job: RowJob
    workplace: Workplace
    in_flight: Weights | None = None
    calls_engines: bool = False
    #: the program writes its result to the path in spec["result"]; False: only its exit code counts
    reports: bool = True

    def run(self) -> JsonObject:
        """Run the program to its end; returns its result. Raises ProgramFailed, StartFailed, NodeUnfit, Cancelled.

        While the shared directory fails, the program is started again for up to `outage_s`, and continues where it was. After that
        NodeUnfit blames this node, not the program. The programs of an update belong together and are not restarted: torchrun exits with 1,
        so their failure is a failure of the attempt.
        """
        job, workplace, context = self.job, self.workplace, self.context
        job.stop_if_cancelled()
        failures: list[str] = []

        def once() -> JsonObject:
            try:
                return self._once()
            except DirectoryFailed as error:
                failures.append(str(error))
                raise

        try:
            result = patiently(
                once,
                workplace.outage_s,
                passes=lambda error: isinstance(error, DirectoryFailed),
                cancel=job.cancel,
                clock=job.clock,
            )
        except DirectoryFailed as error:
            job.stop_if_cancelled()
            raise NodeUnfit(f"node {context.node_rank}: {context.phase.name}: {error}") from None
        if failures:
            line = {"times": len(failures), "why": failures[-1].splitlines()[0]}
            job.events.append({"event": "program_restarted", **line})
        return result

    def _once(self) -> JsonObject:
        """Run the program once. Raises DirectoryFailed, and the errors of `run`."""
        launch, workplace = self.launch, self.workplace
        if not launch.listens:
            workplace.close_rendezvous()
        files = self._written()
        argv = [word.replace(SPEC, str(files.spec)) for word in launch.argv]
        self.job.progress_file = files.progress
        name = program_name(argv)
        try:
            program = self._start(argv, files.spec)
        except StoreError as error:
            raise DirectoryFailed(str(error)) from None
        workplace.close_rendezvous()
        code = self._watch(program)
        if code != 0:
            why, log = _why_it_failed(program, argv, code), _end_of_log(program)
            ours = name.startswith("fsbarrier.")
            if code == NOT_PERMITTED and ours:
                raise StoreError(f"{why}{log}")
            if code == StoreError.exit_code and ours:
                # Name the directory here, because the program may not have been able to write its log.
                raise DirectoryFailed(f"{why}; {workplace.log_path} fails or is full{log}")
            raise ProgramFailed(f"{why}{log}")
        result = read_result(files.result, name) if self.reports else {}
        discard(files.folder)
        return result

    def _written(self) -> WorkerFiles:
        """The paths of the program's files; writes the spec. Raises NodeUnfit."""
        launch, workplace = self.launch, self.workplace
        workplace.programs_started += 1
        files = WorkerFiles(workplace.work_dir / f"job-{workplace.programs_started:05d}")
        helps = launch.resident is not None and launch.resident.name == HELPER
        module = {"module": program_name(launch.argv)} if helps else {}
        record = str(RunPaths(workplace.log_path).record)
        try:
            files.write_spec(
                {"settings": self.context.settings.as_json(), "run_record": record, **module, **self.spec}
            )
        except OSError as error:
            raise NodeUnfit(
                f"node {self.context.node_rank}: its temporary folder {workplace.work_dir} cannot be written to: {error.strerror}"
            ) from None
        return files

    def _start(self, argv: Sequence[str], spec: Path) -> Child | KeptProgram:
        """Start the program, or give the job to processes that stayed. Raises ProgramFailed, StoreError, NodeUnfit."""
        launch, workplace = self.launch, self.workplace
        listening = [listener.fileno() for listener in workplace.rendezvous]
        env = with_this_package(_environment(argv, self.context.settings, workplace.work_dir))
        env |= dict(launch.env)
        if launch.devices is not None and len(launch.devices) < len(workplace.devices):
            env |= visible([workplace.devices[number] for number in launch.devices])
        if listening:
            env[LISTENING] = ",".join(map(str, listening))
        log_file, name = workplace.log_dir / launch.log, self.context.phase.name
        if launch.resident is None:
            return workplace.host.start(
                argv,
                env=env,
                log_file=log_file,
                name=name,
                pass_fds=listening,
                private_network=launch.private_network,
            )
        return self._give_to_resident(launch.resident, spec, argv, env, listening)

    def _give_to_resident(
        self,
        resident: Resident,
        spec: Path,
        argv: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
    ) -> KeptProgram:
        """The node's resident program of this name, with `spec` as its job; a new one if there is none, or a new one is asked for.

        Raises ProgramFailed, StoreError, NodeUnfit.
        """
        context, workplace = self.context, self.workplace
        name, kept = resident.name, workplace.residents.get(resident.name)
        if resident.reuse and (kept is None or kept.name != resident.reuse):
            raise ProgramFailed(f"{program_name(argv)}, kept from an earlier update, has ended")
        if kept is not None and (resident.reuse or (resident.reuse is None and kept.alive)):
            kept.give(spec)
            return kept
        workplace.end_resident(name)
        shown_name, kept_name = name, name
        if resident.reuse is not None:
            # The trainer's processes on all nodes belong together, so their name is unique and the same on every node.
            shown_name, kept_name = context.phase.name, f"{context.generation}.{context.iteration}"
        try:
            kept = workplace.host.keep(kept_name, resident.processes, workplace.work_dir / f"{name}-jobs")
        except OSError as error:
            raise NodeUnfit(
                f"node {context.node_rank}: no socket in its temporary folder {workplace.work_dir}: {error.strerror}"
            ) from None
        if name == HELPER:
            argv = own_program("fsbarrier.workers.helper", "--spec", str(spec))
        kept.start(
            argv,
            env=env,
            log_file=workplace.log_dir / self.launch.log,
            name=shown_name,
            pass_fds=pass_fds,
            private_network=self.launch.private_network,
        )
        workplace.residents[name] = kept
        return kept

    def _watch(self, child: Child | KeptProgram) -> int:
        """Wait for the program; returns its exit code. Ends it if its progress file and log do not change for `stall_timeout_s`, or if
        it needs an engine and none is left."""
        job, workplace = self.job, self.workplace
        assert job.progress_file is not None
        in_flight = (
            None
            if self.in_flight is None
            else InFlight(self.in_flight, job, workplace, self.context.settings)
        )
        last_stamp, changed_at = 0, job.clock()
        while (code := child.wait(WATCH_S)) is None:
            if job.cancel.is_set():
                child.stop(workplace.grace_s)
                raise Cancelled
            if self.calls_engines and (how := workplace.engines_gone()):
                child.stop(workplace.grace_s)
                raise ProgramFailed(how)
            if in_flight is not None:
                begin = job.clock()
                try:
                    in_flight.load_if_complete()
                except BaseException:
                    child.stop(workplace.grace_s)
                    raise
                # The program may have waited for the engines, so do not count this time as a stall.
                changed_at += job.clock() - begin
            stamp = _modified_ns(job.progress_file) + _modified_ns(child.log_file)
            if stamp != last_stamp:
                last_stamp, changed_at = stamp, job.clock()
            elif job.clock() - changed_at > workplace.stall_timeout_s:
                # The stacks in its log then show where it hangs.
                write_stacks(child.tree())
                child.stop(workplace.grace_s)
                raise ProgramFailed(
                    f"no progress for {workplace.stall_timeout_s:g} s (coordination.stall_timeout_s); "
                    f"{self.context.phase.name} was ended{_end_of_log(child)}"
                )
        return code


def _environment(argv: Sequence[str], settings: Settings, work_dir: Path) -> Mapping[str, str]:
    """The daemon's environment without keys. A program that runs the user's code (a reward, an agent, a trainer) may need some of
    them, and loses only the trackers' keys.
    """
    name = program_name(argv)
    if name not in NO_SECRETS:
        return without_trackers_keys(os.environ, settings.tracker.names)
    ours = without_secrets(os.environ, (settings.judge.api_key_env, settings.engine.api_key_env))
    # torch loads compiled code from a temporary folder with a predictable name, and leaves folders behind.
    return {**ours, "TMPDIR": str(work_dir)} if name == UPDATE else ours


def program_name(argv: Sequence[str]) -> str:
    """A command's name for people: the module after the last `-m` (torchrun has an earlier one), else the file name."""
    modules = [argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "-m"]
    return modules[-1] if modules else Path(argv[0]).name


def _why_it_failed(program: Child | KeptProgram, argv: Sequence[str], code: int) -> str:
    """How the program ended, with the line of its log that says why."""
    name = program_name(argv)
    lines = program.last_log_lines(failure_reason.SEARCHED_LINES)
    cause = failure_reason.cause(lines, killed=code < 0)
    return f"{name} {failure_reason.how_it_ended(code)}{f': {cause}' if cause else ''}"


def _end_of_log(child: Child | KeptProgram) -> str:
    lines = (f"(from {child.log_file})", *child.last_log_lines())
    return "".join(f"\n{line}" for line in lines)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
