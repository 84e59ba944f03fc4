"""Every value of every setting is in a complete run of the default program: to its last iteration, and on from there.

The values, and the settings that are run elsewhere, stand in options.py. A new setting that is in neither fails here by name.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import setting_reads
from complete_runs import Bench, be_program, in_a_fork, wait_for, write_tasks
from engine_bench import write_model
from judge_server import judge_that_says
from options import ELSEWHERE, GROUPS, NOT_ALWAYS_ACTED_ON, covering_rows, with_effect
from waiting import until

from fsbarrier.settings.sections import Settings, known_names
from fsbarrier.settings.sources import SET_NAME, known_as

pytestmark = pytest.mark.torch

ROWS, EVERY_DAY = covering_rows()
MINE = """
class Agent:
    async def run(self, task, client):
        text = isinstance(task.prompt, str)
        await (client.complete(task.prompt) if text else client.chat(task.messages))
        return client.trajectory(asked=1)

async def reward(prompt, response, answer, metadata):
    return {"reward": float(response == answer), "length": len(response)}

async def judged(prompt, response, answer, metadata, judge):
    return float(await judge.ask("?")) + (response == answer)

def loss(new, old, advantages):
    return -(new - old).exp() * advantages
"""


# --- that nothing is left out ---------------------------------------------------------------------------------------------


def wanted() -> Iterator[str]:
    """What is to be run of each setting: `name`, or `name=value` for each value that its type lists."""
    for name, kind in known_names().items():
        if name not in ("eval.sets", "train.sets"):
            yield name
            yield from (f"{name}={value}" for value in listed(kind.hint))


def listed(hint: Any) -> Iterator[str]:
    if NoneType in get_args(hint):
        yield "none"
        hint = get_args(hint)[0]
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if hint is bool:
        yield from ("true", "false")
    elif get_origin(hint) is Literal:
        yield from get_args(hint)


def run_values() -> set[str]:
    found = set[str]()
    for alternatives in GROUPS.values():
        for word in shlex.split(" ".join(alternatives)):
            name, _, value = word.partition("=")
            name = "custom" if name.startswith("custom.") else known_as(name)
            found |= {name, f"{name}={value}"}
    return found


def test_every_value_of_every_setting_is_run() -> None:
    there, needed = run_values(), list(wanted())
    missing = [
        one
        for one in needed
        if one not in there and one not in ELSEWHERE and one.partition("=")[0] not in ELSEWHERE
    ]
    assert not missing, "in no run of options.py"
    assert not [one for one in ELSEWHERE if one in there or one not in needed], (
        "is run here, or is no setting"
    )


# --- the runs -------------------------------------------------------------------------------------------------------------


def write_in_form(folder: Path, form: str) -> None:
    """The tasks as text in JSON lines, as chat messages, or in Parquet files."""
    import pyarrow
    from pyarrow import parquet

    for path in write_tasks(folder).glob("t*.jsonl"):
        tasks = [json.loads(line) for line in path.read_text().splitlines()]
        if form == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(tasks), path.with_suffix(".parquet"))
            path.unlink()
        if form == "chat":
            for task in tasks:
                task["prompt"] = [{"role": "user", "content": f"!say {task['answer']}!!mixed"}]
            path.write_text("".join(json.dumps(task) + "\n" for task in tasks))


@pytest.fixture(scope="session")
def place(bench: Bench) -> Iterator[dict[str, str]]:
    """What the words of options.py name: data in several forms, a user's code, a run to begin with, a judge, an engine."""
    folder = bench.folder
    bench.environ |= {"JUDGE_KEY": "j", "ENGINE_KEY": "e"}
    (folder / "mine.py").write_text(MINE)
    (folder / "notify.sh").write_text("#!/bin/sh\ncat > /dev/null\n")
    (folder / "notify.sh").chmod(0o755)
    (bench.model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for form in ("data", "chat", "parquet"):
        write_in_form(folder / form, form)
        (folder / form / "model").symlink_to(bench.model)
        for name in ("easy", "mine"):
            shutil.copy(bench.data / "test.jsonl", folder / form / f"{name}.jsonl")
    write_model(folder / "rm", architectures=["Qwen2ForSequenceClassification"])
    (folder / "rm" / "tokenizer.json").write_text("{}")
    bench.run(folder / "first", "--iterations", "1", "checkpoint.trainer_every=1").check()
    with judge_that_says(lambda asked: "1") as judge:
        with (folder / "engine.txt").open("w") as out:
            environ = {**bench.environ, "VLLM_API_KEY": "e"}
            server = in_a_fork(lambda: be_program("fsbarrier.workers.vllm_server", []), out.fileno(), environ)
        port = folder / "fake" / "port"
        until(lambda: port.exists() and port.read_text())
        engine = f"http://127.0.0.1:{port.read_text()}"
        yield {"bench": str(folder), "judge": judge, "engine": engine}
    os.killpg(server, signal.SIGKILL)
    wait_for(server, 10)


def not_acted_on(
    words: list[str], settings: dict[str, object], reads: dict[str, list[Any]], idle: tuple[str, ...]
) -> list[str]:
    """The settings of a command line that no program has read with their values. `idle`: how the names of those begin that none needs."""
    found = []
    for word in words:
        given = word.partition("=")[0]
        name = "custom" if given.startswith("custom.") else known_as(given)
        if name in NOT_ALWAYS_ACTED_ON or name.startswith(idle):
            continue
        value = settings[given]
        # What a set says comes before what all sets say, and that before the rollout's.
        name = name.replace(SET_NAME, "eval")
        if value is None and name.startswith("eval."):
            continue
        if value not in reads.get(name, ()):
            found.append(word)
    return found


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] if n >= EVERY_DAY else []) for n in range(len(ROWS))],
)
def test_a_run_with_these_settings_reaches_its_end_and_goes_on(
    bench: Bench, place: dict[str, str], tmp_path: Path, number: int
) -> None:
    words = [word.format_map(place) for word in with_effect(ROWS[number])]
    nodes = next(int(word[-1]) for word in words if word.startswith("num_nodes="))
    reads = tmp_path / "reads"
    first = 1 if number < EVERY_DAY else 2
    for last in (first, first + 1):
        ended = bench.run(tmp_path / "run", "--iterations", str(last), *words, nodes=nodes, reads=reads)
        assert set(ended.codes) == {0}, f"{shlex.join(words)}\n{ended.described()}"
    published = [event["policy_version"] for event in ended.events("weights_published")]
    iterations = [*range(1, first + 2)]
    assert published == iterations, shlex.join(words)
    assert {event["iteration"] for event in ended.events("rolled_out")} == {*iterations}
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    settings = Settings.from_json(record["settings"]).flat()
    steps = sum(event["optimizer_steps"] for event in ended.events("updated"))
    idle = (
        *(() if steps else ("algorithm.", "optimizer.")),
        *(("engine.",) if place["engine"] in str(words) else ()),
    )
    assert not not_acted_on(words, settings, setting_reads.reads(reads), idle), shlex.join(words)
    shutil.rmtree(tmp_path)
