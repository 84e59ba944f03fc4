"""Short iterations. A node that is back becomes ready only once there is a file `ready` beside the run."""

from __future__ import annotations

from fsbarrier.node import Node
from fsbarrier.program import Phase, Program
from fsbarrier.specs import Launch


def work(node: Node) -> None:
    node.command(Launch(("sleep", "0.2"), "work.log"))


def get_ready(node: Node) -> None:
    if node.context.incarnation > 1:
        ready = node.context.paths.root.parent / "ready"
        node.command(Launch(("sh", "-c", f"until [ -e '{ready}' ]; do sleep 0.05; done"), "work.log"))


PROGRAM = Program(
    "unready",
    (Phase(0, "start"), Phase(1, "work", each=work), Phase(2, "get_ready", each=get_ready, ready=True)),
)
