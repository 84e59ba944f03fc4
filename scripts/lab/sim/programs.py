"""The programs that a simulated node starts: rollout, merge, prepare, update. They take time, fail, and leave small files."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from fsbarrier.data.merge import Part
from fsbarrier.decisions import RolloutReport
from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.processes.failure_reason import MESSAGE
from fsbarrier.processes.worker_contract import WorkerFiles
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.protocol.state import Node
from fsbarrier.rollouts.rollout_spec import RolloutOutcome, RolloutSpec
from fsbarrier.run.worker_program import program_name
from fsbarrier.specs import Identity, MergeReport, MergeSpec, PrepareSpec, UpdateSpec
from fsbarrier.training.delta_write import Against
from fsbarrier.training.weights_copy import WeightsCopy
from sim.artifacts import WEIGHTS, PartFile, SimTorchrun
from sim.history import Merged, MergedGroup, Missing, Used
from sim.schedule import Schedule, SimThread, Start

FOREVER = float("inf")
Waiting = Generator[float, None, JsonObject]
# every how many versions one is whole where nodes have copies of the weights
WHOLE_EVERY = 3
# the size of one group of trajectories in a simulated part
GROUP_BYTES = 100
# how long a program's end may stay unnoticed where nothing else happens, and its node need not look for weights
POLL_S = 2.0
# what a process says whose partner has gone
PARTNER_GONE = "connection closed by peer"
# what programs say when they fail
FAILURES = ("the program ended with exit code 1", "out of memory", "cannot read the batch")


class ProgramHost:
    """What a process's job and programs share."""

    def __init__(self, process: Start) -> None:
        self.process, self.world, self.artifacts = process, process.schedule, process.schedule.artifacts
        #: the policy that the engines really serve
        self.serving = ""
        #: the node when its job began
        self.node: Node | None = None
        #: of the job
        self.thread: SimThread | None = None

    def sleep(self, seconds: float) -> None:
        """The job waits."""
        assert self.thread is not None
        self.thread.sleep(seconds)

    def wake(self) -> None:
        """A program has ended, for which the job may wait."""
        if self.thread is not None:
            self.thread.wake()


def failure_of_a_program(world: Schedule, rank: int, phase_name: str) -> tuple[float, str] | None:
    """The fraction of its time after which a program fails, and its message; None if it succeeds."""
    failure, key = None, (rank, phase_name)
    if world.failures.get(key, 0) > 0:
        world.failures[key] -= 1
        failure = 0.5, FAILURES[0]
    elif not world.healed and rank == world.draw.broken_node:
        failure = 0.1, "a library is missing"
    elif not world.healed and world.rng.random() < world.draw.failure_rate:
        failure = world.rng.random(), world.rng.choice(FAILURES)
    world.history.faults |= {"program"} if failure else set()
    return failure


class SimProgram:
    """A program with the methods of Child, and if its process stays for other jobs, of KeptProgram."""

    def __init__(self, host: ProgramHost, name: str = "", *, stays: bool = False) -> None:
        self.host, self.name, self._stays = host, name, stays
        self.alive, self.log_file = True, Path()
        self.meeting: SimTorchrun | None = None
        self.broken = ""
        self._argv: Sequence[str] = ()
        self._code: int | None = None
        self._said = ""
        self._result = Path()
        self._steps: Waiting
        self._node: Node
        self._fails: tuple[float, str] | None = None
        self._in_flight = False
        # which job the pending steps belong to
        self._job = 0

    # --- what the node does with it ---

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_file: Path,
        name: str,
        pass_fds: Sequence[int] = (),
        private_network: bool = False,
    ) -> None:
        self._argv, self.log_file = argv, log_file
        self.give(Path(argv[argv.index("--spec") + 1]))

    def give(self, spec: Path) -> None:
        """The next job."""
        world, told = self.host.world, json.loads(spec.read_text())
        module = told.get("module") or program_name(self._argv)
        files = WorkerFiles(spec.parent)
        self._code, self._result, self._job = None, files.result, self._job + 1
        assert self.host.node is not None
        self._node, self._in_flight = self.host.node, told.get("in_flight", False)
        self._fails = failure_of_a_program(world, self.host.process.rank, Identity.from_json(told).phase_name)
        works: dict[str, Callable[[], Waiting]] = {
            "fsbarrier.workers.rollout": lambda: self._rollout(RolloutSpec.from_json(told)),
            "fsbarrier.aggregate": lambda: self._aggregate(MergeSpec.from_json(told)),
            "fsbarrier.workers.prepare": lambda: self._prepare(PrepareSpec.from_json(told)),
            "fsbarrier.workers.update": lambda: self._update(UpdateSpec.from_json(told)),
        }
        self._steps = works[module]()
        world.after(world.short(), partial(self._advance, self._job))

    def wait(self, timeout_s: float) -> int | None:
        if self._code is None:
            self.host.sleep(timeout_s if self._in_flight else POLL_S)
        return self._code

    def stop(self, grace_s: float = 0.0) -> None:
        """End it, as its guard also does when its node is killed."""
        self.alive = False
        self._leave_meeting()

    def tree(self) -> dict[int, int]:
        return {}

    def last_log_lines(self, lines: int = 1) -> list[str]:
        return [f"{MESSAGE}{self._said}"]

    # --- time ---

    def advance(self) -> None:
        """Take the next step, unless the program has ended. While its host is stopped, the step is deferred."""
        self._advance(self._job)

    def _advance(self, job: int) -> None:
        process = self.host.process
        if not self.alive or job != self._job or self._code is not None:
            return
        if process.paused and process.frozen:
            process.deferred.append(partial(self._advance, job))
            return
        try:
            if self.broken:
                raise ProgramFailed(self.broken)
            wait = next(self._steps)
        except StopIteration as stop:
            self._end(stop.value)
        except StoreError as error:
            self._fail(StoreError.exit_code, str(error))
        except ProgramFailed as error:
            self._fail(1, str(error))
        else:
            if wait != FOREVER:
                self.host.world.after(wait, partial(self._advance, job))

    def _end(self, result: Payload) -> None:
        if self.host.process.client.outage is not None:
            # torchrun has one exit code for all failures.
            code = 1 if "--nnodes" in self._argv else StoreError.exit_code
            self._fail(code, "the shared directory fails")
            return
        self._result.write_text(json.dumps(result))
        self._code, self.alive = 0, self._stays
        self.host.wake()

    def _fail(self, code: int, said: str) -> None:
        self._code, self._said, self.alive = code, said, False
        self._leave_meeting()
        self.host.wake()

    def _leave_meeting(self) -> None:
        """A node leaves a torchrun. Half of the time the others' processes fail a second later; otherwise they hang."""
        meeting, world = self.meeting, self.host.world
        if meeting is None or meeting.lost:
            return
        meeting.lost = True
        if world.rng.random() < 0.5:
            for other in meeting.programs.values():
                if other.alive:
                    other.broken = PARTNER_GONE
                    world.after(1.0, other.advance)

    def _busy(self, parts: int = 1) -> Iterator[float]:
        """The duration of a program, in `parts` pieces. A failing program raises ProgramFailed on the way."""
        length = self.host.world.length()
        for number in range(parts):
            if self._fails is not None and (number + 1) / parts >= self._fails[0]:
                yield length / parts * self._fails[0]
                raise ProgramFailed(self._fails[1])
            yield length / parts

    # --- what they do ---

    def _rollout(self, spec: RolloutSpec) -> Waiting:
        artifacts, world, part_name = self.host.artifacts, self.host.world, str(spec.part)
        self._need(spec)
        fresh = PartFile(spec.identity.generation, spec.identity.iteration, spec.split, spec.policy)
        self._only_writer(spec.part)
        part = artifacts.parts.setdefault(part_name, fresh)
        done = {task for task, *_ in part.groups}
        tasks, rounds = _tasks_of_rounds(spec)
        left = [task for task in tasks if task not in done]
        for task, wait in zip(left, self._busy(len(left)), strict=True):
            yield wait
            part.groups.append((task, world.now, self.host.serving))
        report = RolloutReport(spec.part.name, tasks, rounds=rounds, groups=len(part.groups))
        return RolloutOutcome(report).as_json()

    def _aggregate(self, spec: MergeSpec) -> Waiting:
        artifacts, world, request = self.host.artifacts, self.host.world, spec.request
        expected, metadata, out = request.expected or (), request.metadata, str(request.out)
        entries = self._taken(request.parts, expected)
        absent = {*expected} ^ {entry.task for entry in entries}
        if absent:
            raise ProgramFailed(f"tasks {sorted(absent)} are in no part, or not expected")
        yield from self._busy()
        merged = Merged(
            artifacts.stamp(),
            world.now,
            out,
            metadata["split"],
            metadata["iteration"],
            metadata["generation"],
            metadata["policy"],
            tuple(p for p in request.parts if p.valid_bytes is not None),
            tuple(entries),
            final=metadata.get("final", False),
            rounds=max(1, len(expected) // world.history.tasks[metadata["split"]]),
        )
        self._only_writer(request.out)
        request.out.write_text(str(merged.stamp))
        world.history.merges.append(merged)
        rank, name = self.host.process.rank, request.out.name
        world.say(
            f"node {rank} merged {len(entries)} tasks of generation {merged.generation} into {name}", "="
        )
        return MergeReport(groups=len(entries), bytes=merged.stamp).as_json()

    def _taken(self, sources: Sequence[Part], expected: Container[int]) -> list[MergedGroup]:
        """For each expected task, its first group in a source that lists the task."""
        first_groups: dict[int, MergedGroup] = {}
        for source in sources:
            part, valid = self.host.artifacts.parts[str(source.path)], source.valid_bytes
            durable = part.groups[: None if valid is None else valid // GROUP_BYTES]
            for index, (task, _, policy) in enumerate(durable):
                if task in (source.tasks or ()) and task in expected:
                    entry = MergedGroup(task, str(source.path), index, part.generation, policy)
                    first_groups.setdefault(task, entry)
        return [*first_groups.values()]

    def _prepare(self, spec: PrepareSpec) -> Waiting:
        history, now = self.host.world.history, self.host.world.now
        newest, *earlier = spec.merged
        if not newest.exists():
            raise ProgramFailed(f"{newest} is not there")
        for path in (newest, *(path for path in earlier if path.exists())):
            if (stamp := int(path.read_text())) != 0:
                history.used.append(Used(now, self._node, stamp))
        yield from self._busy()
        self._only_writer(spec.batch)
        spec.batch.touch()
        return {}

    def _update(self, spec: UpdateSpec) -> Waiting:
        host, argv, out = self.host, dict(zip(self._argv[:-1], self._argv[1:], strict=True)), spec.out
        if not spec.batch.exists():
            raise ProgramFailed(f"{spec.batch} is not there")
        self._need(spec)
        for wait in self._busy():
            yield wait / 2
        key = argv["--master-addr"], argv["--master-port"], str(out)
        meeting = host.artifacts.meetings.setdefault(key, SimTorchrun(int(argv["--nnodes"])))
        meeting.programs[int(argv["--node-rank"])] = self
        self.meeting = meeting
        if len(meeting.programs) == meeting.size and not meeting.lost:
            # Of one even length, since a delta changes a file and not its length.
            meeting.weights = f"weights {host.artifacts.stamp():08d}"
            length = host.world.draw.training_s + host.world.length()
            for other in meeting.programs.values():
                if other is not self and other.alive:
                    host.world.after(length, other.advance)
            yield length
        else:
            yield FOREVER
        while meeting.lost:
            yield FOREVER
        self.meeting = None
        before = spec.trainer_state.parent if spec.trainer_state is not None else None
        copies = WeightsCopy(spec.weights_dir) if spec.weights_dir is not None else None
        if copies is not None:
            copies.begin(out.name, 0, keep=before.name if before is not None else "")
            (copies.unchecked(out.name) / WEIGHTS).write_text(meeting.weights)
        if argv["--node-rank"] == "0":
            if out.exists():
                raise AssertionError(f"two writers of {out}")
            version, generation = spec.new_policy_version, spec.identity.generation
            against = Against.of(before, version, generation, WHOLE_EVERY) if before and copies else None
            host.artifacts.make_policy(out, spec.new_policy_version, meeting.weights, against, copies)
        if copies is not None and before is not None:
            copies.discard(before.name)
        return {}

    def _only_writer(self, path: Path) -> None:
        """Check that nobody else is writing or has written a file. A program that is started again may go on with it."""
        number = self.host.process.number
        if self.host.artifacts.writers.setdefault(str(path), number) != number:
            raise AssertionError(f"two writers of {path}")

    def _need(self, spec: RolloutSpec | UpdateSpec) -> None:
        """Fail if the folder of the policy that the program works with has been removed; the run's first model is always there."""
        if spec.policy_version and (spec.model is None or not spec.model.is_dir()):
            missing = Missing(self.host.world.now, self.host.process.number, self._node, str(spec.model))
            self.host.world.history.missing.append(missing)
            raise ProgramFailed(f"{spec.model} is not there")


def _tasks_of_rounds(spec: RolloutSpec) -> tuple[Sequence[int], int | None]:
    """This node's tasks of the rounds that take place, and how many those are; None without refills.

    The real programs see by the claims whether a round is needed. All of a generation's nodes see the same.
    """
    if spec.refills is None:
        return spec.tasks, None
    sizes = [len(one.tasks) for one in spec.rounds]
    rounds = 1 + (spec.identity.generation + spec.identity.iteration) % len(sizes)
    wanted = spec.expected[: sum(sizes[:rounds])]
    return [task for task in spec.tasks if task in wanted], rounds
