"""I18: whoever waits goes on once what it waits for is there.

While a schedule runs, the world notes each standstill (`World._note_standstills`): nothing hinders any node, and nothing has been written
for so long that every piece of work is done and every node has seen the others. If the nodes that are alive are all that the settings ask
for, they wait for each other in vain. No deadline excuses that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsbarrier.protocol.facts import Join
from fsbarrier.protocol.state import Node, Rules, Stage
from sim.history import History


def i18_whoever_waits_goes_on(history: History, rules: Rules) -> Iterator[str]:
    """No standstill in which the nodes that are alive are all that they wait for."""
    for stands in history.standstills:
        if _may_go_on(history, rules, stands.nodes):
            nodes = ", ".join(f"node {node.rank} ({node.stage}, {node.part.value})" for node in stands.nodes)
            yield f"nothing happened from {stands.since:.0f} s to {stands.time:.0f} s, and all that is needed is there: {nodes}"


def _may_go_on(history: History, rules: Rules, nodes: Sequence[Node]) -> bool:
    """Whether these nodes are all that the settings ask for. If none of them is a member, a session begins, with all nodes."""
    members = {node.rank for node in nodes if node.stage is Stage.RUNNING}
    ranks = members | _may_join(history, nodes, min(members or {node.rank for node in nodes}))
    known = [node.generation for node in nodes if node.rank in members and node.generation is not None]
    if not known:
        return len(ranks) >= rules.num_nodes
    newest = max(known, key=lambda generation: generation.number)
    if rules.on_node_failure == "wait":
        complete = ranks.issuperset(newest.ranks)
    else:
        complete = rules.on_node_failure == "abort" or not rules.under(newest.settings).lacks(ranks)
    return complete or history.stopped_at is not None


def _may_join(history: History, nodes: Sequence[Node], first: int) -> set[int]:
    """The ranks that run the same code as node `first`, and ask for no other settings."""
    joins = {node.rank: history.joins[node.rank, node.incarnation].record for node in nodes}
    code = {rank: join.digest for rank, join in joins.items() if isinstance(join, Join) and not join.stated}
    return {rank for rank, digest in code.items() if digest == code.get(first, digest)}
