"""A rollout program's share of the tasks, as its spec says it: what it may start, when the phase may end, and what its file tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsbarrier.rollouts import claims
from fsbarrier.rollouts.claims import Claims
from fsbarrier.rollouts.early_end import Tail

HEADER = ("run_id", "split", "iteration", "generation", "node_rank", "policy_version")

Spec = Mapping[str, Any]


def open_claims(spec: Spec) -> Claims:
    """What this node may start. Says in the log why it may not take over from others. Raises StoreError."""
    if spec["fixed_shares"]:
        print(f"this node does its own share and no more: {spec['fixed_shares']}", flush=True)
    shares = {int(rank): share for rank, share in spec["shares"].items()}
    alone = bool(spec["fixed_shares"]) or len(shares) == 1
    folder = None if alone else Path(spec["claims"])
    return Claims(shares, spec["node_rank"], folder=folder, incarnation=spec["incarnation"])


def tidy(spec: Spec) -> None:
    """Remove this node's part of the claims of the iteration before, in which nobody is any more."""
    for folder in spec["old_claims"]:
        claims.tidy(Path(folder), spec["node_rank"])


def open_tail(spec: Spec) -> Tail | None:
    """Tells when the phase ends although not all is done; None where it never does. Raises OSError."""
    if spec["completion_threshold"] >= 1:
        return None
    return Tail(
        Path(spec["claims"]),
        spec["node_rank"],
        wanted=len(spec["expected"]),
        there=spec["there"],
        share=spec["completion_threshold"],
        grace_s=spec["grace_s"],
    )


def origin(spec: Spec) -> dict[str, Any]:
    """Where the part file comes from: known to its header and to the metadata of the finished file."""
    return {name: spec[name] for name in HEADER}


def header(spec: Spec) -> dict[str, Any]:
    """What the part file says at its start. `expected`, the tasks of all nodes: a merge by hand can name those of a node without
    any file. `assigned`: those that this file must hold to be whole, where nobody else may do them."""
    assigned = {"assigned": list(spec["tasks"])} if spec["fixed_shares"] else {}
    keep = {"keep": spec["keep"]} if spec["keep"] else {}
    return {**origin(spec), **assigned, "expected": list(spec["expected"]), **keep}


def result(taken: Claims, tasks: list[int], *, ended_early: bool) -> dict[str, Any]:
    """For the node's report: the tasks whose groups are in its part, and what taking over came to."""
    return {"tasks": tasks, "ended_early": ended_early, **taken.summary()}
