"""The invariant of published results: merged files under their public names, and model.pt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsbarrier.sim.history import History, Merged


def published_too_late(history: History, stamps: Mapping[int, Merged]) -> Iterator[str]:
    """Nobody publishes a result while its mount shows a newer generation, and model.pt never goes back."""
    public = [(put.name, stamps[put.stamp].generation, put.shown) for put in history.published]
    public += [("model.pt", put.generation, put.shown) for put in history.served]
    for name, generation, shown in public:
        newer = [n for n in history.generations if n > generation and f"gen-{n:06d}.json" in shown]
        if newer:
            yield f"{name} became generation {generation}'s where generation {max(newer)} was to be seen"
    for before, after in zip(history.served[:-1], history.served[1:], strict=True):
        taken_back = after.generation in history.recovered
        # A leader of an older generation may link the same folder once more, where its mount does not show the newer one yet.
        moved = after.folder != before.folder
        if (
            moved
            and (after.version, after.generation) < (before.version, before.generation)
            and not taken_back
        ):
            yield f"model.pt went from {before.folder} back to {after.folder}"
