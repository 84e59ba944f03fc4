"""Short iterations. A node that is back becomes ready only once there is a file `ready` beside the run."""

from __future__ import annotations

from fsbarrier.program import Command, Context, Phase, Program, Value, Work


def work(ctx: Context) -> Work:
    return Command(("sleep", "0.2"), "work.log", result=False)


def get_ready(ctx: Context) -> Work:
    if ctx.incarnation == 1:
        return Value({})
    ready = ctx.paths.root.parent / "ready"
    return Command(("sh", "-c", f"until [ -e '{ready}' ]; do sleep 0.05; done"), "work.log", result=False)


PROGRAM = Program(
    "unready",
    (Phase(0, "start"), Phase(1, "work", each=work), Phase(2, "get_ready", each=get_ready, ready=True)),
)
