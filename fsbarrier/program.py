"""The types of a program: a table of rows (phases), and for each row the functions that do its work by calling their node.

phases/rl.py is an example, phases/README.md the page for authors. The state machine walks the table without knowing what a row means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fsbarrier.decisions import JsonRecord
from fsbarrier.node import Node
from fsbarrier.processes.worker_contract import MAX_NESTING, MAX_RESULT_BYTES, nesting
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.protocol.rows import Row, Slice, Table

#: the phases of an RL iteration by number; status and the journal show these names
PHASE_NAMES = (
    "iteration_start",
    "train_assign",
    "train_rollout",
    "train_shards_ready",
    "train_aggregate",
    "eval_decide",
    "eval_rollout",
    "engine_stop",
    "batch_prepare",
    "update_ready",
    "update",
    "weights_publish",
    "engine_start",
    "iteration_end",
)
#: the slices that `--rl-phase` can run alone
RL_SLICES = (
    Slice("rollout", "iteration_start", "eval_rollout", result="train_aggregate"),
    Slice("update", "engine_stop", "iteration_end", result="weights_publish"),
)

#: What a row returns: the leader's is the row's decision, another member's its report. None: there is nothing to say.
Result = JsonRecord | Payload | None
RowFunction = Callable[[Node], Result]


def value_of(returned: object, function: Callable[..., object]) -> JsonObject:
    """What a row's function has returned, as the other nodes will read it: tuples become lists. Raises TypeError if it does not fit into a
    fact."""
    value = {} if returned is None else returned
    if isinstance(value, JsonRecord):
        value = value.as_json()
    if not isinstance(value, Mapping):
        # A callable object has no name.
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{name} returned {type(returned).__name__}; a row returns a record, a mapping or None"
        )
    written = json.dumps(value)
    if len(written) > MAX_RESULT_BYTES:
        raise TypeError(f"a result of {len(written)} bytes; write it to a file, and return the file's path")
    if nesting(value) > MAX_NESTING:
        raise TypeError(f"a result that is nested more than {MAX_NESTING} deep")
    read: JsonObject = json.loads(written)
    return read


class Phase(Row[RowFunction]):
    """One row of a program; its functions `each` and `leader` call their node (fsbarrier/node.py)."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Program(Table[RowFunction]):
    """A program: its phases in order, and its slices."""

    #: what a run must have: a "model"; files in the data path, of tasks ("data") or of "examples" for supervised fine-tuning; without a
    #: model, what a "merge" of trajectory files needs
    needs: frozenset[str] = frozenset()
    #: by dotted name: settings where the user chooses none, and those that cannot be chosen
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)

    @property
    def reads_data(self) -> bool:
        """Whether a run must have a data path."""
        return not self.needs.isdisjoint({"data", "examples"})
