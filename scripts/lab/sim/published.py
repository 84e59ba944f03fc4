"""The invariants of what is published: merged files under their public names and model.pt (I4); and of the removal of old facts (I9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsbarrier.rundir.names import FACT
from sim.history import History, Merged, row_of


def published_too_late(history: History, stamps: Mapping[int, Merged]) -> Iterator[str]:
    """Nobody publishes a result while its mount shows a newer generation, and model.pt never goes back."""
    public = [(put.name, stamps[put.stamp].generation, put.shown) for put in history.published]
    public += [("model.pt", put.generation, put.shown) for put in history.served]
    for name, generation, shown in public:
        newer = [n for n in history.generations if n > generation and f"gen-{n:06d}.json" in shown]
        if newer:
            yield f"{name} became generation {generation}'s where generation {max(newer)} was to be seen"
    for before, after in zip(history.served[:-1], history.served[1:], strict=True):
        # A leader of an older generation may link the same folder once more, where its mount does not show the newer one yet.
        older = (after.version, after.generation) < (before.version, before.generation)
        if after.folder != before.folder and older:
            yield f"model.pt went from {before.folder} back to {after.folder}"


def no_fact_is_needed_after_its_removal(history: History) -> Iterator[str]:
    """A fact is removed only when all members have entered a later iteration, and a leader's, whose name a seal may take, not before
    there is a newer generation. Generations older than the newest need no facts.
    """
    for read in history.asked:
        # A process that hung in a look, while the others formed a newer generation, may come late.
        late = any(
            newer > row_of(read.path)[0] and write.time <= read.time
            for newer, (write, _) in history.generations.items()
        )
        if not late:
            yield f"node {read.rank} read {read.path}, which was removed"
    entered: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for event, (number, iteration, _) in history.entered:
        entered.setdefault((number, event.node.rank), []).append((event.time, iteration))
    for removed in history.removed:
        number, iteration, _ = removed.place
        record = history.generations[number][1]
        if any(
            newer > number and write.time <= removed.time for newer, (write, _) in history.generations.items()
        ):
            continue
        fact = FACT.parse(removed.path.rpartition("/")[2])
        if fact is not None and fact.rank == record.leader:
            yield f"{removed.path} was removed, so that its row can be sealed although it was passed"
        for rank in record.ranks:
            if not any(
                time <= removed.time and later > iteration for time, later in entered.get((number, rank), ())
            ):
                yield f"{removed.path} was removed before node {rank} had left that iteration"
