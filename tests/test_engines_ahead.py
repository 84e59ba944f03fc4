"""Engines that load while the nodes join: a phase takes over what it needs, and nothing else is ever served."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_bench import write_model
from test_node_work import context, policy

from fsbarrier.engine import command
from fsbarrier.engine.engine import EngineInfo
from fsbarrier.errors import ProgramFailed
from fsbarrier.loader import load_program
from fsbarrier.node import work_kinds
from fsbarrier.node.engines_ahead import begin_ahead, first_policy
from fsbarrier.node.job import Cancelled, RowJob, Workplace
from fsbarrier.program import ReleaseEngine, ServeWeights
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import Settings
from fsbarrier.supervision.template import Template

RL = load_program("rl")
DEADLINE_S = 60.0


class SlowEngines:
    """One engine whose start ends when it is let go, or called off."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.asked: list[tuple[Path, int]] = []
        self.serving: tuple[Path, int] | None = None
        self.fails = ""
        self.released = False

    def ensure(self, weights: Path, version: int, *, cancel: threading.Event, **_: Any) -> list[EngineInfo]:
        self.asked.append((weights, version))
        action = "kept" if self.serving == (weights, version) else "started"
        if action == "started":
            self.begun.set()
            while not self.may_end.wait(0.01):
                if cancel.is_set():
                    raise ProgramFailed("called off")
            if self.fails:
                raise ProgramFailed(self.fails)
            self.serving = weights, version
        return [EngineInfo("url", "key", "policy", version, 1, 7.5 if action == "started" else 0.0, action)]

    def release(self, *, cancel: threading.Event) -> dict[str, str]:
        self.released = True
        return {"action": "none"}


@pytest.fixture
def engines() -> SlowEngines:
    return SlowEngines()


@pytest.fixture
def place(engines: SlowEngines, tmp_path: Path) -> Workplace:
    return Workplace(
        engines=cast(Any, engines),
        template=Template((), work_dir=tmp_path / "work", log_file=tmp_path / "template.log"),
        work_dir=tmp_path / "work",
        log_dir=tmp_path / "logs",
        log_path=tmp_path,
        stall_timeout_s=60.0,
    )


def settings(**chosen: Any) -> Settings:
    return replace(resolve([], {"program": "rl"}, cross_checks=False), **chosen)


def record(tmp_path: Path) -> RunRecord:
    model = write_model(tmp_path / "first_model")
    return cast(RunRecord, SimpleNamespace(log_path=tmp_path, paths=RunPaths(tmp_path), model=str(model)))


@pytest.fixture
def first(place: Workplace, engines: SlowEngines, tmp_path: Path) -> ServeWeights:
    """The load of the run's first model, under way."""
    begin_ahead(place, record(tmp_path), settings(), RL, 0)
    assert place.ahead is not None and engines.begun.wait(DEADLINE_S)
    return ServeWeights(tmp_path / "first_model", 0)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    out: list[object] = []

    def run() -> None:
        try:
            out.append(call())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def test_a_phase_takes_over_what_was_loaded_and_the_journal_says_how_long_it_took(
    place: Workplace, engines: SlowEngines, first: ServeWeights
) -> None:
    engines.may_end.set()
    done = work_kinds.carry_out(first, context(), RowJob(), place)
    # The second time to see that it still serves.
    assert engines.asked == [(first.folder, 0)] * 2
    (line,) = done["events"]
    assert (line["engine_action"], line["loaded_s"]) == ("started", 7.5) and line["engine_s"] < 7.5
    assert place.engine_access == [{"url": "url", "api_key": "key", "model": "policy"}]
    # What comes later is no longer told of it, and an engine that was only kept is no news.
    assert work_kinds.carry_out(first, context(), RowJob(), place)["events"] == []


def test_an_engine_that_died_since_is_started_by_the_phase(
    place: Workplace, engines: SlowEngines, first: ServeWeights
) -> None:
    engines.may_end.set()
    assert place.ahead is not None
    place.ahead.take(first, RowJob())
    engines.serving = None
    (line,) = work_kinds.carry_out(first, context(), RowJob(), place)["events"]
    assert line["engine_action"] == "started" and engines.serving == (first.folder, 0)


def test_a_load_of_another_policy_has_ended_before_the_right_one_is_asked_for(
    place: Workplace, engines: SlowEngines, first: ServeWeights, tmp_path: Path
) -> None:
    other = ServeWeights(tmp_path, 3)
    thread, out = in_thread(lambda: work_kinds.carry_out(other, context(), RowJob(), place))
    while len(engines.asked) < 2:
        assert thread.is_alive()
    engines.may_end.set()
    thread.join(DEADLINE_S)
    # The first was called off: it never served.
    assert engines.serving == (tmp_path, 3) and place.ahead is None
    assert cast(Any, out)[0]["events"][0]["serving"] == 3


def test_a_load_that_fails_while_a_phase_waits_fails_the_phase_and_an_earlier_failure_does_not(
    place: Workplace, engines: SlowEngines, first: ServeWeights
) -> None:
    engines.fails = "out of memory"
    job = RowJob()
    thread, out = in_thread(lambda: work_kinds.carry_out(first, context(), job, place))
    while job.progress != {"note": "engine: policy version 0"}:
        assert thread.is_alive()
    engines.may_end.set()
    thread.join(DEADLINE_S)
    assert isinstance(out[0], ProgramFailed) and str(out[0]) == "out of memory"
    engines.fails = ""
    (line,) = work_kinds.carry_out(first, context(), RowJob(), place)["events"]
    assert line["engine_action"] == "started"


def test_a_cancelled_phase_leaves_the_load_to_the_next(
    place: Workplace, engines: SlowEngines, first: ServeWeights
) -> None:
    job = RowJob()
    thread, out = in_thread(lambda: work_kinds.carry_out(first, context(), job, place))
    while job.progress != {"note": "engine: policy version 0"}:
        assert thread.is_alive()
    job.cancel.set()
    thread.join(DEADLINE_S)
    assert isinstance(out[0], Cancelled) and job.doing == ""
    engines.may_end.set()
    work_kinds.carry_out(first, context(), RowJob(), place)
    assert engines.asked == [(first.folder, 0)] * 2


def test_a_trainer_finds_no_load_under_way(
    place: Workplace, engines: SlowEngines, first: ServeWeights
) -> None:
    work_kinds.carry_out(ReleaseEngine(), context(), RowJob(), place)
    assert engines.released and engines.serving is None and place.ahead is None


def test_nothing_is_loaded_before_it_was_compared_with_its_manifest(
    place: Workplace, engines: SlowEngines, tmp_path: Path
) -> None:
    published = policy(tmp_path)
    (published.folder / "model" / "weights").write_bytes(b"w" * 99 + b"v")
    checkpoints.publish_link(tmp_path, published.folder, lambda: None)
    serve = first_policy(record(tmp_path), settings(num_nodes=1), RL, 0)
    assert serve is not None and serve.folder == published.folder / "model"
    begin_ahead(place, record(tmp_path), settings(num_nodes=1), RL, 0)
    with pytest.raises(ProgramFailed, match=r"weights differs from what MANIFEST\.json says"):
        work_kinds.carry_out(serve, context(), RowJob(), place)
    assert engines.asked == []


def test_nothing_is_loaded_where_it_would_be_in_the_way_or_the_cores_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, three_nodes = record(tmp_path), settings(num_nodes=3)
    begun = first_policy(found, three_nodes, RL, 0)
    assert begun is not None and (begun.folder, begun.policy_version) == (tmp_path / "first_model", 0)
    assert first_policy(found, settings(rl_phase="update"), RL, 0) is None
    assert first_policy(found, settings(debug_mode=True), RL, 0) is None
    assert first_policy(found, three_nodes, load_program("toy"), 0) is None
    # A model that keeps several threads busy: how many it gets depends on who else is here.
    monkeypatch.setattr(command, "PARAMETERS_PER_THREAD", 4)
    assert first_policy(found, three_nodes, RL, 0) is None
    assert first_policy(found, three_nodes, RL, 8) is not None
    assert first_policy(found, settings(num_nodes=1), RL, 0) is not None
