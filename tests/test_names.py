"""Names under the run directory: read back as they were built, and none leads out of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, is_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording_node import RecordingNode
from test_assign import context, rl

from fsbarrier.context import Context
from fsbarrier.errors import ProgramFailed
from fsbarrier.node import Node
from fsbarrier.rundir import names
from fsbarrier.rundir.names import Name

KINDS = {name: kind for name, kind in vars(names).items() if isinstance(kind, Name)}
NUMBERS = st.integers(0, 10**18 - 1) | st.sampled_from([0, 9, 99, 9999, 10_000, 999_999, 1_000_000])
WORDS = st.sampled_from(["train", "test", "done", "failed", "update", "train_rollout", "weights_publish"])
STRANGE = st.sampled_from(
    ["", ".", "~", ".swp", ".tmp", "0", "00", "-", "x", " ", "\n", "٣", "_rank_", "gen-"]
)


def fields_of(kind: Name[Any]) -> st.SearchStrategy[tuple[int | str, ...]]:
    """Values for the fields of a kind of name, by its template."""
    specs = [part.partition("}")[0] for part in kind.template.split("{")[1:]]
    return st.tuples(*[WORDS if spec == ":s" else NUMBERS for spec in specs])


def values(meaning: Any) -> tuple[int | str, ...]:
    """The fields that a name was read as."""
    everything = astuple(meaning) if is_dataclass(meaning) and not isinstance(meaning, type) else (meaning,)
    return tuple(value for value in everything if value is not None)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(data=st.data())
def test_what_was_built_is_read_back(kind: Name[Any], data: st.DataObject) -> None:
    fields = data.draw(fields_of(kind))
    assert values(kind.parse(kind.build(*fields))) == fields


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(data=st.data())
def test_nothing_else_is_read(kind: Name[Any], data: st.DataObject) -> None:
    """A name with something strange in it is either none, or exactly what building would have written."""
    name = kind.build(*data.draw(fields_of(kind)))
    begin = data.draw(st.integers(0, len(name)))
    end = data.draw(st.integers(begin, min(len(name), begin + 2)))
    strange = name[:begin] + data.draw(STRANGE) + name[end:]
    for text in (strange, data.draw(st.text(max_size=40))):
        meaning = kind.parse(text)
        assert meaning is None or kind.build(*values(meaning)) == text


def test_the_names_that_scripts_rely_on() -> None:
    """As the design says, to the letter."""
    merged = "train_trajectories.pt.iteration5"
    part = f"{merged}_rank_0.checkpoint.g0002i0001v000004.part"
    assert names.MERGED.build("train", 5) == merged
    assert names.RANK_CHECKPOINT.build("train", 5, 0) == f"{merged}_rank_0.checkpoint"
    assert names.parse_trajectories(part) == names.TrajectoryName("train", 5, 0, 2, 1, 4)
    assert names.parse_trajectories(f"{merged}.g0002") == names.TrajectoryName("train", 5, None, 2)
    assert names.START.parse("node-0001.inc-0002.json") == names.StartName(1, 2)
    assert names.START.parse("node-00001.inc-0002.json") is None
    assert names.JOURNAL.build(1, 2) == "node_1.inc-0002.jsonl"
    assert names.PHASE_FOLDER.parse("p02-train_rollout") == names.PhaseName(2, "train_rollout")
    assert names.FACT.parse("iter-000007.node-0001.done") == names.FactName(7, 1, "done")


# --- in records -----------------------------------------------------------------------------------------------------------------

POLICY = "policy-000003.g0002"


def decided(phase: str, iteration: int = 3, **value: Any) -> Mapping[str, Any]:
    return {phase: {"iteration": iteration, "value": value}}


def spec_of(row: Callable[[Node], object], ctx: Context) -> Any:
    """What the first program of a row is told."""
    node = RecordingNode(ctx)
    row(node)
    return node.specs[0]


def published(path: str) -> Mapping[str, Any]:
    return decided("weights_publish", 2, folder=path, policy_version=3, digest="d")


def readers(said: str) -> dict[str, Callable[[], object]]:
    """What reads a name in each of the records; `said`: a pattern for the names."""
    named = said.format
    decision = {"wanted": [1, 2], "shares": {"0": [2], "1": []}, "fixed_shares": ""}
    adopted = [{"name": named("part"), "valid_bytes": 10, "tasks": [1]}]
    makes = {"folder": named(POLICY), "policy_version": 3}
    made = decided("update_ready", makes=makes, master_addr="127.0.0.1", master_port=1, trainer="")
    merged = decided("train_aggregate", merged=named("merged"), earlier=[named("merged")])
    batch = {**decided("batch_prepare", batch=named("batch"), port=1), **made}

    def parts(adopted: list[dict[str, Any]], report: dict[str, Any]) -> list[str]:
        assigned = decided("train_assign", **decision, adopted=adopted)
        ctx = context("train_aggregate", decisions=assigned, reports=lambda phase: {0: report})
        return [str(one.path) for one in spec_of(rl.aggregate_train, ctx).request.parts]

    return {
        "policy": lambda: str(context(decisions=published(named(POLICY))).policy.model),
        "merged": lambda: [*map(str, rl.learned_from(context("batch_prepare", decisions=merged)))],
        "adopted": lambda: parts(adopted, {"tasks": [2]}),
        "report": lambda: parts([], {"part": named("part"), "tasks": [2]}),
        "batch": lambda: str(
            spec_of(rl.update, context("update", decisions=batch, joins={}, accelerators=0, cpus=2)).batch
        ),
        "update": lambda: str(rl.publication(context("weights_publish", decisions=made)).folder),
    }


def test_what_decisions_name_is_looked_for_in_the_run() -> None:
    found = {name: read() for name, read in readers("{}").items()}
    rollouts, checkpoints = "/run/train_trajectories", "/run/checkpoints"
    assert found == {
        "policy": f"{checkpoints}/{POLICY}/model",
        "merged": [f"{rollouts}/merged"] * 2,
        "adopted": [f"{rollouts}/part"],
        "report": [f"{rollouts}/part"],
        "batch": f"{checkpoints}/batches/batch",
        "update": f"{checkpoints}/{POLICY}",
    }


@pytest.mark.parametrize("said", ("/outside/{}", "../../outside/{}", "outside/{}", "..", "{}\0"))
def test_what_leads_out_of_the_run_is_refused(said: str) -> None:
    for read in readers(said).values():
        with pytest.raises(ProgramFailed, match="which is no file in /run/"):
            read()
