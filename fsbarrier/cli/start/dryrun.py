"""`--dry-run`: lists each command of each phase on each node, using the same functions as a run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from fsbarrier.cli.start.node_checks import only_shows_runs
from fsbarrier.engine import accelerators
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.loader import load_program
from fsbarrier.program import Builder, Context, Work, build_work
from fsbarrier.protocol.facts import Join, Member, Payload
from fsbarrier.run import work_kinds
from fsbarrier.rundir.runrecord import RunRecord, numbers_in
from fsbarrier.settings.hidden import shown
from fsbarrier.settings.placement import ALL, Ranges
from fsbarrier.settings.section import leaves
from fsbarrier.settings.sections import Settings
from fsbarrier.store.printable import printable, without_passwords


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
        for rank, index, name, command in commands:
            if rank == node_rank:
                print(f"# {index:2d} {name:<18} {command}")
    return 0


def _toml_key(name: str) -> str:
    parts = name.split(".")
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part) for part in parts)


def as_toml(value: object) -> str:
    """A setting's value in TOML."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(str(key))} = {as_toml(one)}" for key, one in value.items())
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
        python=sys.executable,
        accelerators=each if {*settings.placed.values()} != {ALL} else 0,
        joins={r: Join(r, 1, f"node-{r}", 0, f"host-{r}", (f"ADDRESS-OF-NODE-{r}",)) for r in ranks},
    )
    for row in program.rows[first : last + 1]:
        context = replace(context, phase=row)
        works = {
            rank: [_work(row.each, replace(context, node_rank=rank))] if row.each else [] for rank in ranks
        }
        reports = {rank: dict(work_kinds.expected(work)) for rank, own in works.items() for work in own}
        if row.leader:
            # As in a run, the leader works after the others and sees their results.
            work = _work(row.leader, replace(context, reports=partial(_the_same, reports)))
            works[0].append(work)
            reports[0] = {**reports.get(0, {}), **work_kinds.expected(work)}
        for rank, own in works.items():
            for text in (text for work in own for text in work_kinds.describe(work, settings)):
                yield rank, row.index, row.name, text
        if reports.get(0):
            decided = {row.name: {"iteration": 1, "value": reports[0]}}
            context = replace(context, decisions={**context.decisions, **decided})


def _work(build: Builder, context: Context) -> Work:
    """The work that a row's function describes. Raises UsageError if the function, which may be the user's, fails."""
    try:
        return build_work(build, context)
    except FsbarrierError:
        raise
    except (Exception, SystemExit) as error:
        where = f"--program {context.settings.program}: phase {context.phase.name}"
        raise UsageError(f"{where}: {type(error).__name__}: {error}") from None


def _the_same(reports: Mapping[int, Payload], phase_name: str) -> Mapping[int, Payload]:
    return reports
