"""The toy program with a row, `custom.row`, whose program is `custom.script`; under torchrun if `custom.processes` says how many."""

from __future__ import annotations

import sys
from dataclasses import replace

from fsbarrier.loader import load_module
from fsbarrier.node import Node
from fsbarrier.program import Phase, Result, RowFunction
from fsbarrier.specs import Launch

toy = load_module("toy")


def crash(node: Node) -> None:
    custom = node.context.settings.custom
    torchrun = ("-m", "fsbarrier.workers.torchrun", "--nproc-per-node", str(custom["processes"]))
    words = (*torchrun, "--master-addr", "127.0.0.1", "--master-port", "0") if custom["processes"] else ()
    node.command(Launch((sys.executable, *words, custom["script"]), "crash.log"))


def perhaps_crashing(row: Phase, function: RowFunction | None) -> RowFunction | None:
    def call(node: Node) -> Result:
        assert function is not None
        if node.context.settings.custom["row"] != row.index:
            return function(node)
        crash(node)
        return None

    return call if function is not None else None


def row(old: Phase) -> Phase:
    return replace(old, each=perhaps_crashing(old, old.each), leader=perhaps_crashing(old, old.leader))


PROGRAM = replace(toy.PROGRAM, name="crashing", rows=tuple(row(old) for old in toy.PROGRAM.rows))
