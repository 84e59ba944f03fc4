"""`fsbarrier launch local`: several nodes of one run on this machine (fsbarrier/commands/local_nodes.py)."""

from __future__ import annotations

import argparse
from dataclasses import replace

from fsbarrier.commands import flags
from fsbarrier.errors import UsageError

SUMMARY = """Start several nodes on this machine, with one live view; Ctrl-C ends them all.

On several machines there is nothing to launch from one place. Type (or let ssh, Slurm, Kubernetes type) on each node, in
one clone on the shared filesystem:

  ./run.sh --master --num-nodes 3        on the first node
  ./run.sh --worker 1                    on the second, and so on
  srun --nodes 3 --ntasks-per-node 1 ./run.sh    Slurm: ranks and count come from its variables"""
EXAMPLE = "fsbarrier launch local --nodes 3 --program toy --iterations 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", nargs="?", default="", metavar="local", help="where the nodes are to run")
    parser.add_argument("--nodes", metavar="N", help="how many (default 1, or what the run's record says)")
    flags.add_run_flags(parser)


def main(args: argparse.Namespace) -> int:
    if args.where != "local":
        mistake = f"launch {args.where}: not" if args.where and "=" not in args.where else "launch: say"
        raise UsageError(
            f"{mistake} `local`; on other machines type ./run.sh on each node (see fsbarrier launch --help)"
        )
    if None not in (args.nodes, args.num_nodes) and args.nodes != args.num_nodes:
        raise UsageError(f"--nodes {args.nodes} and --num-nodes {args.num_nodes} differ; one is enough")
    flag = "--num-nodes"
    if args.nodes is not None:
        flag, args.num_nodes = "--nodes", args.nodes
    chosen = flags.gather(args)
    # So that a wrong number is reported with the flag that was typed.
    chosen = tuple(replace(item, source=flag) if item.source == "--num-nodes" else item for item in chosen)
    from fsbarrier.commands import local_nodes

    return local_nodes.run_all(chosen, {}, args)
