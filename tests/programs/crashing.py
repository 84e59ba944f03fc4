"""The toy program with a row, `custom.row`, whose program is `custom.script`; under torchrun if `custom.processes` says how many."""

from __future__ import annotations

import sys
from dataclasses import replace

from fsbarrier.loader import load_module
from fsbarrier.program import Command, Context, Phase, Work

toy = load_module("toy")


def crash(ctx: Context) -> Work:
    custom = ctx.settings.custom
    torchrun = ("-m", "fsbarrier.workers.torchrun", "--nproc-per-node", str(custom["processes"]))
    words = (*torchrun, "--master-addr", "127.0.0.1", "--master-port", "0") if custom["processes"] else ()
    return Command((sys.executable, *words, custom["script"]), "crash.log")


def row(old: Phase) -> Phase:
    def each(ctx: Context) -> Work:
        if ctx.settings.custom["row"] == old.index:
            return crash(ctx)
        work: Work = old.each(ctx)
        return work

    def leader(ctx: Context) -> Work:
        if ctx.settings.custom["row"] == old.index:
            return crash(ctx)
        work: Work = old.leader(ctx)
        return work

    return replace(old, each=each if old.each else None, leader=leader if old.leader else None)


PROGRAM = replace(toy.PROGRAM, name="crashing", rows=tuple(row(old) for old in toy.PROGRAM.rows))
