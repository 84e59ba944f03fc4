"""`--dry-run`: lists each command of each phase on each node, by calling the same rows as a run, with a node that only describes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from fsbarrier.cli.start.node_checks import only_shows_runs
from fsbarrier.context import Context
from fsbarrier.decisions import JsonRecord, PublishDecision
from fsbarrier.engine import accelerators, answer_format, command, model
from fsbarrier.engine.answer_format import NO_CHOICE, Parsers
from fsbarrier.engine.placement import replicas
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.loader import load_program
from fsbarrier.network.listening import LOOPBACK
from fsbarrier.node import Node, Port, Publication, Weights
from fsbarrier.program import RowFunction, value_of
from fsbarrier.protocol.facts import Join, JsonObject, Member, Payload
from fsbarrier.rundir.runrecord import RunRecord, numbers_in
from fsbarrier.settings.placement import ALL, Ranges
from fsbarrier.settings.secrecy import shown
from fsbarrier.settings.section import leaves
from fsbarrier.settings.sections import ServerSettings, Settings
from fsbarrier.specs import SPEC, EngineAddress, Launch, PolicyEngine, Spec
from fsbarrier.wording import printable, without_passwords

R = TypeVar("R", bound=JsonRecord)

# What a dry run shows in place of values that are only known in a run, and how much of a value.
PORT, SOCKET, SHOWN_CHARACTERS = "PORT", "SOCKET", 160


@dataclass(frozen=True)
class DescribingNode(Node):
    """A node that does nothing. Each call adds what would be done to `lines`, and returns its result as far as that is known."""

    context: Context
    lines: list[str] = field(default_factory=list)
    log_dir: Path = Path("LOGS")
    weights_dir: Path | None = None

    def seeing(self, context: Context) -> Self:
        return replace(self, context=context)

    def event(self, name: str, *fields: JsonRecord | Mapping[str, object]) -> None:
        """A dry run has no journal."""

    def run(
        self,
        spec: Spec[R],
        launch: Launch | None = None,
        *,
        in_flight: Weights | None = None,
        calls_engines: bool = False,
    ) -> R:
        self._describe(launch or spec.launch)
        return spec.report_type()()

    def command(self, launch: Launch, spec: JsonRecord | None = None) -> None:
        self._describe(launch)

    def _describe(self, launch: Launch) -> None:
        words = [f"{name}={value}" for name, value in launch.env.items()]
        self.lines.append(shlex.join([*words, *(word.replace(SPEC, "SPEC.json") for word in launch.argv)]))

    def serve(self, weights: Weights) -> tuple[PolicyEngine, ...]:
        """Add the vLLM command line that this machine would use. Later policy versions are loaded into the running server."""
        settings, folder = self.context.settings, weights.folder
        self.lines.append(f"engine: serve {folder} as policy version {weights.policy_version}")
        if weights.policy_version:
            return ()
        if settings.debug_mode:
            self.lines.append("engine: use your own server (--debug-mode)")
        elif not folder.is_dir():
            self.lines.append("engine: start vLLM on the model, once the run has created it")
        else:
            parsers = Parsers.of(settings.rollout)
            agent = settings.rollout.agent is not None
            self.lines.extend(answer_format.told(folder, parsers, agent=agent))
            served = answer_format.served_by(folder, parsers)
            self.lines.extend(_servers(folder, settings.engine, weights.threads, parsers=served))
        return ()

    def serve_frozen(self, name: str, *, threads: int, devices: tuple[int, ...] | None) -> None:
        own = self.context.settings.engines[name]
        servers = _servers(Path(str(own.model)), own, threads, name)
        self.lines.extend([f"engines.{name}: serve {own.model}", *servers])

    def frozen_engines(self) -> Mapping[str, EngineAddress]:
        return {}

    def release_engines(self, frozen: Sequence[str] = ()) -> JsonObject:
        self.lines.append("engine: free the accelerator's memory")
        return {}

    def listen(self, addresses: tuple[str, ...]) -> Port:
        where = "loopback only" if addresses == LOOPBACK else "all interfaces"
        self.lines.append(f"listen on a free port ({where}) for the update")
        return PORT

    def reachable(self, addresses: tuple[str, ...], port: Port) -> Sequence[str]:
        self.lines.append(f"connect to {', '.join(addresses)} port {port}")
        return addresses

    def publish_weights(self, publication: Publication) -> PublishDecision:
        folder, version = publication.folder, publication.policy_version
        every = f", every {publication.keep_every}th" if publication.keep_every else ""
        kept = f"keep the newest {publication.keep}{every}, and the best evaluated"
        self.lines.append(f"verify {folder}, publish it as policy version {version}, {kept}")
        return PublishDecision(version, folder.name)

    def publish_file(self, source: Path, name: Path) -> None:
        self.lines.append(f"publish {source} as {name}")


def _servers(
    folder: Path,
    settings: ServerSettings,
    threads: int,
    name: str = command.SERVED_NAME,
    parsers: Parsers = NO_CHOICE,
) -> list[str]:
    """The command line of a server on this machine, and how many there are."""
    devices = accelerators.detect()
    count = replicas(settings, len(devices))
    plan = command.ServerPlan(
        python=sys.executable,
        model=model.inspect(folder),
        settings=settings,
        socket=SOCKET,
        seed=0,
        accelerated=bool(devices),
        sleeps=False,
        threads=max(1, threads // count),
        served_name=name,
        parsers=parsers,
    )
    words = command.argv(plan)
    words[words.index("--seed") + 1] = "SEED"
    own = [f"engine: {count} servers like this, each on its own accelerators or cores"] if count > 1 else []
    return [*own, shlex.join(words)]


def show(record: RunRecord, settings: Settings, *, as_json: bool) -> int:
    """Print the settings and the commands of a run; writes no files."""
    commands = [(*where, without_passwords(command)) for *where, command in describe(record, settings)]
    if as_json:
        keys = ("node_rank", "phase", "phase_name", "command")
        listed = [dict(zip(keys, row, strict=True)) for row in commands]
        print(
            json.dumps(
                {
                    "settings": shown(settings.as_json()),
                    "tasks": record.tasks,
                    "model": record.model,
                    "light_environment": only_shows_runs(),
                    "commands": listed,
                }
            )
        )
        return 0
    if only_shows_runs():
        print(
            "# This is the light environment for dry runs. A real start creates the full one, and then checks packages and your code."
        )
    print(f"# settings (digest {record.settings_digest[:12]})")
    for key, value in leaves(shown(settings.as_json())):
        # As `--config` reads it: TOML has no null, so what is not set is a comment.
        print(f"# {key} is not set" if value is None else f"{_toml_key(key)} = {as_toml(value)}")
    for split, source in record.tasks.items():
        print(printable(f"# {split}: {len(numbers_in(source))} tasks in {source['path']}"))
    for node_rank in range(settings.num_nodes):
        print(f"\n# node {node_rank}")
        for rank, index, name, text in commands:
            if rank == node_rank:
                print(f"# {index:2d} {name:<18} {text}")
    return 0


def _toml_key(name: str) -> str:
    parts = name.split(".")
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part) for part in parts)


def as_toml(value: object) -> str:
    """A setting's value in TOML."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(str(key))} = {as_toml(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    # JSON writes DEL as it is, which TOML does not allow.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def describe(record: RunRecord, settings: Settings) -> Iterator[tuple[int, int, str, str]]:
    """(node rank, phase index, phase name, description) for each piece of work in the first iteration."""
    program = load_program(settings.program)
    first, last = program.span(settings.rl_phase)
    ranks = range(settings.num_nodes)
    each = (settings.expect_gpus or 0) // settings.num_nodes or len(accelerators.detect())
    for name, text in settings.placed.items():
        ranges = Ranges.parse(text)
        if not each and not (ranges.everything or ranges.nodes):
            raise UsageError(
                f"{name}={text} counts accelerators, and this machine has none: for a dry run add --expect-gpus N, the number "
                "of all nodes together"
            )
    context = Context(
        run_id=record.run_id,
        paths=record.paths,
        settings=settings,
        tasks=record.tasks,
        model=Path(record.model) if record.model else None,
        node_rank=0,
        incarnation=1,
        members=tuple(Member(rank, 1, f"node-{rank}") for rank in ranks),
        leader=0,
        generation=1,
        iteration=1,
        attempt=0,
        phase=program.rows[first],
        decisions={},
        accelerators=each if {*settings.placed.values()} != {ALL} else 0,
        joins={r: Join(r, 1, f"node-{r}", 0, f"host-{r}", (f"ADDRESS-OF-NODE-{r}",)) for r in ranks},
    )
    for row in program.rows[first : last + 1]:
        context = replace(context, phase=row)
        descriptions: list[tuple[int, list[str]]] = []
        reports: dict[int, Payload] = {}
        if row.each:
            for rank in ranks:
                lines, reports[rank] = _called(row.each, replace(context, node_rank=rank))
                descriptions.append((rank, lines))
        if row.leader:
            # As in a run, the leader works after the others and sees their results.
            lines, decision = _called(row.leader, replace(context, reports=partial(_the_same, {**reports})))
            descriptions.append((0, lines))
            reports[0] = {**reports.get(0, {}), **decision}
        for rank, lines in descriptions:
            for text in lines:
                yield rank, row.index, row.name, text
        if reports.get(0):
            decided = {row.name: {"iteration": 1, "value": reports[0]}}
            context = replace(context, decisions={**context.decisions, **decided})


def _called(function: RowFunction, context: Context) -> tuple[list[str], Payload]:
    """What a row's function would do, and what it returns, as the other nodes would read it. Raises UsageError if the function, which may
    be the user's, fails."""
    node = DescribingNode(context)
    try:
        value = value_of(function(node), function)
    except FsbarrierError:
        raise
    except (Exception, SystemExit) as error:
        where = f"--program {context.settings.program}: phase {context.phase.name}"
        raise UsageError(f"{where}: {type(error).__name__}: {error}") from None
    if value and not node.lines:
        text = json.dumps(value)
        node.lines.append(
            f"decide {text if len(text) <= SHOWN_CHARACTERS else f'{text[:SHOWN_CHARACTERS]}...'}"
        )
    return node.lines, value


def _the_same(reports: Mapping[int, Payload], phase_name: str) -> Mapping[int, Payload]:
    return reports
