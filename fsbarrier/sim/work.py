"""Simulated work: the real program table (phases/rl.py) with stand-ins for the programs behind its commands.

The table's functions are the real code: they decide who rolls out what, what is adopted, what is merged. The stand-ins take time, fail, and
leave parts, merged files and checkpoints as entries in tables.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator
from typing import TYPE_CHECKING, cast

from fsbarrier.errors import NodesRefused, ProgramFailed
from fsbarrier.node.context_maker import ContextMaker
from fsbarrier.node.job import NodeUnfit
from fsbarrier.node.worker_program import program_name
from fsbarrier.program import (
    Command,
    Context,
    OpenRendezvous,
    PartOnDisk,
    ProbeAddresses,
    PublishFile,
    PublishWeights,
    ReleaseEngine,
    ServeWeights,
    Steps,
    Value,
    Work,
)
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.protocol.state import Node, RowPart, WorkReport
from fsbarrier.protocol.succession import STARTS
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.runrecord import RunRecord, TaskSource
from fsbarrier.sim.artifacts import FOREVER, Checkpoint, PartFile, SimTorchrun, Waiting, WorkPiece
from fsbarrier.sim.disk import SimPath
from fsbarrier.sim.history import Merged, MergedGroup, Missing, Published, Served, Used
from fsbarrier.sim.setup import PATHS

if TYPE_CHECKING:
    from fsbarrier.sim.process import Process
    from fsbarrier.sim.world import World

GENERATIONS = cast(SimPath, PATHS.generations)
# the size of one group of trajectories in a simulated part
GROUP_BYTES = 100
# the pause before a retry after a filesystem error
RETRY_S = 0.5
TASKS: dict[str, TaskSource] = {
    split: {"path": f"/data/{split}", "count": 18, "sha256": ""} for split in SPLITS
}


class SimWork:
    """The WorkRunner of one simulated process."""

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process, self.artifacts = world, process, world.artifacts
        self.piece: WorkPiece | None = None
        # the policy that this node's engine really serves
        self.serving = ""
        self._report: WorkReport | None = None
        record = RunRecord("sim", "", "", "", world.settings, "", TASKS, "/model")
        self._context = ContextMaker(
            record,
            world.program,
            process.observer,
            parts_of=self._inventory,
            claims_unsafe=lambda: "",
            accelerators=0,
            cpus=1,
            kept_in=lambda generation: "",
        )

    def launch(self, node: Node, part: RowPart) -> None:
        self.cancel()
        piece = WorkPiece(self.process, node, part, self.world.now, self.world.failure_of(node, part))
        piece.steps = self._run(piece)
        self.piece, self._report = piece, None
        self.world.after(self.world.short(), piece.advance)

    def cancel(self) -> None:
        piece, self.piece, self._report = self.piece, None, None
        if piece is not None and piece.alive:
            piece.alive = False
            self.process.trouble.cancelling()
            self._leave_meeting(piece)

    def report(self) -> WorkReport | None:
        return self._report

    def progress(self) -> Payload:
        return {}

    def ended(self, piece: WorkPiece, ok: bool, value: dict[str, object]) -> None:
        """Report the end of a piece of work."""
        piece.alive = False
        if not ok:
            self._leave_meeting(piece)
        self._report = WorkReport(piece.part, ok, value, self.world.now - piece.began)
        self.process.wake(self.world.now + self.world.short())

    def _leave_meeting(self, piece: WorkPiece) -> None:
        """A node leaves a torchrun. Half of the time the others' processes fail a second later; otherwise they hang."""
        meeting = piece.meeting
        if meeting is None or meeting.lost:
            return
        meeting.lost = True
        if self.world.rng.random() < 0.5:
            for other in meeting.pieces.values():
                if other.alive:
                    other.broken = "connection closed by peer"
                    self.world.after(1.0, other.advance)

    # --- what a piece does ---

    def _run(self, piece: WorkPiece) -> Waiting:
        """Build the context, ask the row's function for the work, and do it. The first two are retried while the directory fails."""
        context, since = None, self.world.now
        while True:
            try:
                if context is None:
                    context, since = self._context(piece.node), self.world.now
                builder = context.phase.each if piece.part is RowPart.EACH else context.phase.leader
                assert builder is not None
                self._admit(piece.node)
                work = builder(context)
                break
            except OSError as error:
                try:
                    yield self._retry(error, since)
                except ProgramFailed:
                    # As in node/job_runner.py: another host may be able to read it, and no program has failed.
                    raise NodeUnfit(str(error)) from None
        return (yield from self._do(work, context, piece))

    def _admit(self, node: Node) -> None:
        """At the start of a session, its nodes may not fit together."""
        if self.world.refusals and not self.world.healed and node.place[0].reason in STARTS:
            self.world.refusals -= 1
            self.world.history.faults.add("refused")
            raise NodesRefused("the nodes cannot carry this run")

    def _retry(self, error: OSError, since: float) -> float:
        """The pause before the next retry of a shared directory that has failed since `since`. Raises ProgramFailed after `outage_s`."""
        if self.world.now > since + self.world.paces.outage_s:
            raise ProgramFailed(f"the shared directory fails: {error}") from None
        return RETRY_S

    def _do(self, work: Work, context: Context, piece: WorkPiece) -> Waiting:
        match work:
            case Command():
                piece.inside = False
                result = yield from self._stand_in(work)(work, context, piece)
                piece.inside = True
                return {**work.extra, **result}
            case Value(value):
                return dict(value)
            case Steps(works):
                merged: JsonObject = {}
                for one in works:
                    merged |= yield from self._do(one, context, piece)
                return merged
            case ServeWeights(folder, version):
                self._need(str(folder.parent) if version else "", piece)
                yield self.world.length() / 4
                self.serving = self.artifacts.identity(str(folder.parent)) if version else "start"
                return {"engine_started": False}
            case ReleaseEngine():
                yield self.world.short()
                return {"action": "keep"}
            case OpenRendezvous():
                self.artifacts.ports += 1
                return {"port": self.artifacts.ports}
            case ProbeAddresses(addresses, _):
                yield self.world.short()
                return {"reached": list(addresses)}
            case PublishFile(source, name):
                yield self.world.short()
                yield from self._still_newest(context)
                stamp = self.artifacts.merged[str(source)].stamp
                self.artifacts.public[str(name)] = stamp
                shown = tuple(self.process.client.shown(GENERATIONS))
                self.world.history.published.append(Published(str(name), stamp, shown))
                return {}
            case PublishWeights():
                return (yield from self._publish(work, context, piece))

    def _stand_in(self, work: Command) -> Callable[[Command, Context, WorkPiece], Waiting]:
        """The method that stands in for `python -m PROGRAM`."""
        match program_name(work.argv):
            case "fsbarrier.workers.rollout":
                return self._rollout
            case "fsbarrier.aggregate":
                return self._aggregate
            case "fsbarrier.workers.prepare":
                return self._prepare
            case _:
                return self._update

    def _busy(self, piece: WorkPiece, parts: int = 1) -> Iterator[float]:
        """The duration of a program, in `parts` pieces. A failing program raises ProgramFailed on the way."""
        length = self.world.length()
        for number in range(parts):
            if piece.fails is not None and (number + 1) / parts >= piece.fails[0]:
                yield length / parts * piece.fails[0]
                raise ProgramFailed(piece.fails[1])
            yield length / parts

    def _rollout(self, work: Command, context: Context, piece: WorkPiece) -> Waiting:
        spec = work.spec
        self._need(spec["model"].removesuffix("/model") if spec["policy_version"] else "", piece)
        part = PartFile(context.generation, spec["iteration"], spec["split"], spec["policy"], self.serving)
        self._only_writer(self.artifacts.parts, spec["part"])
        self.artifacts.parts[spec["part"]] = part
        tasks, rounds = self._tasks_of_rounds(spec, context)
        for task, wait in zip(tasks, self._busy(piece, len(tasks)), strict=True):
            yield wait
            part.groups.append((task, self.world.now))
        return {"part": spec["part"], "groups": len(part.groups), "tasks": tasks, "rounds": rounds}

    def _tasks_of_rounds(self, spec: Payload, context: Context) -> tuple[list[int], int | None]:
        """This node's tasks of the rounds that take place, and how many those are; None without refills.

        The real programs see by the claims whether a round is needed. All of a generation's nodes see the same.
        """
        if spec["refills"] is None:
            return spec["tasks"], None
        sizes = spec["refills"]["rounds"]
        rounds = 1 + (context.generation + context.iteration) % len(sizes)
        wanted = spec["expected"][: sum(sizes[:rounds])]
        return [task for task in spec["tasks"] if task in wanted], rounds

    def _aggregate(self, work: Command, context: Context, piece: WorkPiece) -> Waiting:
        spec = work.spec
        entries = self._taken(spec["parts"], spec["expected"])
        absent = set(spec["expected"]) ^ {entry.task for entry in entries}
        if absent:
            raise ProgramFailed(f"tasks {sorted(absent)} are in no part, or not expected")
        yield from self._busy(piece)
        meta, adopted = spec["metadata"], [p for p in spec["parts"] if p["valid_bytes"] is not None]
        self.artifacts.stamps += 1
        merged = Merged(
            self.artifacts.stamps,
            self.world.now,
            spec["out"],
            meta["split"],
            meta["iteration"],
            context.generation,
            meta["policy"],
            tuple(adopted),
            tuple(entries),
            final=meta.get("final", False),
            rounds=work.extra.get("rounds", 1),
        )
        self._only_writer(self.artifacts.merged, spec["out"])
        self.artifacts.merged[spec["out"]] = merged
        self.world.history.merges.append(merged)
        name, rank = merged.out.rpartition("/")[2], piece.process.rank
        self.world.say(
            f"node {rank} merged {len(entries)} tasks of generation {merged.generation} into {name}", "="
        )
        return {"stamp": merged.stamp, "groups": len(entries)}

    def _taken(self, sources: list[JsonObject], expected: Container[int]) -> list[MergedGroup]:
        """For each expected task, its first group in a source that lists the task."""
        taken: dict[int, MergedGroup] = {}
        for source in sources:
            part, valid = self.artifacts.parts[source["path"]], source["valid_bytes"]
            for index, (task, _) in enumerate(part.groups[: None if valid is None else valid // GROUP_BYTES]):
                if task in source["tasks"] and task in expected:
                    entry = MergedGroup(task, source["path"], index, part.generation, part.made_by)
                    taken.setdefault(task, entry)
        return [*taken.values()]

    def _prepare(self, work: Command, context: Context, piece: WorkPiece) -> Waiting:
        for source in work.spec["merged"]:
            merged = self.artifacts.merged.get(source)
            stamp = merged.stamp if merged is not None else self.artifacts.public.get(source)
            if stamp is None and source not in self.artifacts.given:
                raise ProgramFailed(f"{source} is not there")
            if stamp is not None:
                self.world.history.used.append(Used(self.world.now, piece.node, stamp))
        yield from self._busy(piece)
        self._only_writer(self.artifacts.batches, work.spec["batch"])
        self.artifacts.batches.add(work.spec["batch"])
        return {"batch": work.spec["batch"]}

    def _update(self, work: Command, context: Context, piece: WorkPiece) -> Waiting:
        argv = dict(zip(work.argv[:-1], work.argv[1:], strict=True))
        spec, key = work.spec, (argv["--master-addr"], argv["--master-port"])
        if spec["batch"] not in self.artifacts.batches:
            raise ProgramFailed(f"{spec['batch']} is not there")
        self._need(spec["model"].removesuffix("/model") if spec["policy_version"] else "", piece)
        for wait in self._busy(piece):
            yield wait / 2
        meeting = self.artifacts.meetings.setdefault(key, SimTorchrun(int(argv["--nnodes"])))
        meeting.pieces[int(argv["--node-rank"])] = piece
        piece.meeting = meeting
        if len(meeting.pieces) == meeting.size and not meeting.lost:
            length = self.world.length()
            for other in meeting.pieces.values():
                if other is not piece and other.alive:
                    self.world.after(length, other.advance)
            yield length
        else:
            yield FOREVER
        while meeting.lost:
            yield FOREVER
        piece.meeting = None
        if argv["--node-rank"] == "0":
            self.artifacts.stamps += 1
            made = Checkpoint(spec["new_policy_version"], context.generation, str(self.artifacts.stamps))
            self._only_writer(self.artifacts.checkpoints, spec["out"])
            self.artifacts.checkpoints[spec["out"]] = made
        return {}

    def _only_writer(self, there: Container[str], name: str) -> None:
        """Check that nobody else is writing or has written a file."""
        if name in there:
            raise AssertionError(f"two writers of {name}")

    def _publish(self, work: PublishWeights, context: Context, piece: WorkPiece) -> Waiting:
        folder = str(work.folder)
        # The checkpoint is verified.
        yield self.world.length() / 2 if self.world.slow_checks else self.world.short()
        self._need(folder, piece)
        yield from self._still_newest(context)
        shown = tuple(self.process.client.shown(GENERATIONS))
        self.world.history.served.append(Served(folder, work.policy_version, context.generation, shown))
        yield self.world.short()
        yield from self._still_newest(context)
        digest = self.artifacts.checkpoints[folder].digest
        self.artifacts.retain(work.keep, folder)
        return {"policy_version": work.policy_version, "folder": folder, "digest": digest}

    def _still_newest(self, context: Context) -> Generator[float, None, None]:
        newest, since = None, self.world.now
        while newest is None:
            try:
                newest = context.newest()
            except OSError as error:
                yield self._retry(error, since)
        if newest > context.generation:
            raise ProgramFailed(f"generation {context.generation} has ended")

    def _need(self, folder: str, piece: WorkPiece) -> None:
        """Fail if a policy's folder has been removed; "" is the run's first model."""
        if folder and folder not in self.artifacts.checkpoints:
            missing = Missing(self.world.now, piece.process.number, piece.node, folder)
            self.world.history.missing.append(missing)
            raise ProgramFailed(f"{folder} is not there")

    # --- what the table's functions see ---

    def _inventory(self, split: str, iteration: int) -> tuple[PartOnDisk, ...]:
        """The parts as this host sees them, perhaps not up to their ends."""
        until = self.world.now - self.world.rng.random() * self.process.client.habits.oldest_s
        found = []
        for path, part in sorted(self.artifacts.parts.items()):
            if (part.split, part.iteration) == (split, iteration):
                tasks = tuple(task for task, when in part.groups if when <= until)
                if tasks:
                    found.append(PartOnDisk(path, part.policy, len(tasks) * GROUP_BYTES, tasks))
        return tuple(found)
