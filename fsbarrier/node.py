"""The node as a row sees it: what a row may know and do. A row is a function that calls its node and returns a record.

    def rollout_train(node: Node) -> RolloutReport:
        engines = node.serve(policy)
        return node.run(RolloutSpec(node.context.identity, engine=engines, ...))

How a row runs. When the state machine enters a row in which this node has work, the daemon's loop launches one job
(run/job_runner.py). The job has a thread of its own: it makes the Context, and calls the row's function once, with this node. The
loop goes on beside it; it writes heartbeats with the job's progress, and never waits for it.

Each method of the node returns when its work is done, or raises. A row may use what a method returned in the next call: it is ordinary
Python. The function is called once in an attempt and must not be repeated in parts, so whatever fails for a moment is retried inside
one call: reads and publications in the shared directory by themselves, for `outage_s`, and a program that ended because the directory
failed by a new start with the same spec, which goes on where it was. If the directory goes on failing, NodeUnfit ends this node, and
not the program, since another node may be able to work. Any other exception fails the row on this node, and the run may try the row
again: then the function is called anew, on each node.

The loop may cancel the job at any moment, for example since another node has died. The program that runs is then ended, the call
raises Cancelled, and nothing of the job is reported; a row must let that pass. What is published under a public name is published only
if no newer generation exists at that moment, since this node may have slept meanwhile.

How a result becomes a fact. The returned record is checked (JSON, not too large), and the loop finds it with its next look. The state
machine publishes it as the node's fact of this row. The leader's fact is the row's decision; every node reads it with
`context.decision`. `event` adds lines to the node's journal, which are written once the row is done.

There are two implementations: run/working_node.py does the work, and the dry run (cli/start/dryrun.py) describes it, returning what is
known in advance. The simulator runs the first one on simulated surroundings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from fsbarrier.context import Context, Span
from fsbarrier.decisions import BestPolicy, JsonRecord, PublishDecision
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.specs import EngineAddress, Launch, PolicyEngine, Spec

R = TypeVar("R", bound=JsonRecord)
#: a port; a dry run has a text in its place
Port = int | str


@dataclass(frozen=True, slots=True)
class Weights:
    """What all engines of a node serve: they are started, reloaded in place, or left as they are.

    `devices`: the node's accelerators that they use, by number; None: all.
    `threads`: the number of CPU threads for all of them together, if they compute on a CPU.
    `policy`: the identity of the published policy (`Context.policy_identity`); a folder with another one is refused. "": any policy is
    served whose files match the folder's manifest.
    `first_model`: the model with which the run began, to which the adapters of a version that has only these belong.
    """

    folder: Path
    policy_version: int
    threads: int = 0
    policy: str = ""
    devices: tuple[int, ...] | None = None
    #: the nodes that share one engine with this one; None: each has its own
    span: Span | None = None
    first_model: Path | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """A policy version to publish."""

    folder: Path
    policy_version: int
    #: keep this many of the newest versions
    keep: int
    #: the iteration whose update made this version
    trained_on: int = 0
    #: remove batches and trajectories that are at least this many iterations older; 0: none
    keep_batches: int = 0
    keep_trajectories: int = 0
    #: keep every n-th version; 0: no
    keep_every: int = 0
    #: the best version so far, which is kept too
    best: BestPolicy | None = None
    #: the identity of the version before (`Context.policy_identity`)
    previous: str = ""


class Node(ABC):
    """This node, as a row calls it. Each method may raise ProgramFailed and StoreError, which a row lets pass."""

    #: the facts: settings, members, decisions, reports, what is on disk
    context: Context
    #: the folder of this node's logs
    log_dir: Path
    #: the folder on this node for a copy of new weights; None: this node keeps none
    weights_dir: Path | None

    @abstractmethod
    def seeing(self, context: Context) -> Self:
        """The same node, with other facts; for a row that works ahead for the next iteration."""

    @abstractmethod
    def event(self, name: str, *fields: JsonRecord | Mapping[str, object]) -> None:
        """Write a line into the journal when the row is done: the plain values (numbers, texts) of these records. Raises TypeError for a
        name that belongs to the daemon."""

    # --- programs ---

    @abstractmethod
    def run(
        self,
        spec: Spec[R],
        launch: Launch | None = None,
        *,
        in_flight: Weights | None = None,
        calls_engines: bool = False,
    ) -> R:
        """Run the program of this spec to its end; returns its report.

        `launch`: how it is started, where that is not as `spec.launch` says. `calls_engines`: it is ended if none of this node's engines
        is left. `in_flight`: what the local engines serve as soon as that is complete, without ending the program's requests.
        """

    @abstractmethod
    def command(self, launch: Launch, spec: JsonRecord | None = None) -> None:
        """Run a program of which only the exit code counts. Its spec file has the fields of `context.identity` and of `spec`."""

    # --- engines ---

    @abstractmethod
    def serve(self, weights: Weights) -> tuple[PolicyEngine, ...]:
        """Make all of this node's engines serve these weights; returns when they do, for the spec of a program that calls them."""

    @abstractmethod
    def serve_frozen(self, name: str, *, threads: int, devices: tuple[int, ...] | None) -> None:
        """Make this node's servers of the frozen engine `engines.NAME` serve its model. `threads`, `devices`: as in Weights."""

    @abstractmethod
    def frozen_engines(self) -> Mapping[str, EngineAddress]:
        """Where this node's programs find each frozen engine: here, or else on a node that offers it."""

    @abstractmethod
    def release_engines(self, frozen: Sequence[str] = ()) -> JsonObject:
        """Make the local engines free the accelerators' memory: they stop or sleep; without accelerators they stay. Returns what they
        did. `frozen`: the names of the frozen engines that do so too."""

    # --- the meeting of an update's programs ---

    @abstractmethod
    def listen(self, addresses: tuple[str, ...]) -> Port:
        """Listen on a free port of these addresses, so that the other nodes can test them before the update's program takes it over.

        If all addresses are loopback, only this host, which all nodes share, can connect.
        """

    @abstractmethod
    def reachable(self, addresses: tuple[str, ...], port: Port) -> Sequence[str]:
        """The addresses that answer on `port`, in the given order."""

    # --- publications ---

    @abstractmethod
    def publish_weights(self, publication: Publication) -> PublishDecision:
        """Check a policy version's folder, publish it unless a newer generation exists, and clean up."""

    @abstractmethod
    def publish_file(self, source: Path, name: Path) -> None:
        """Publish the file `source` under its public `name`, unless a newer generation exists."""
