"""Show the last lines of the nodes' logs (from each node's latest start), or follow them; or page through the answers of a run."""

from __future__ import annotations

import argparse

from fsbarrier.cli.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.rundir.logs import Log, find_logs, show
from fsbarrier.rundir.paths import RunPaths

EXAMPLE = """fsbarrier logs --node 2 --file vllm -n 100
  fsbarrier logs --first-error
  fsbarrier logs --answers --filter iteration=4 --filter reward_to=0 | less"""
FLAGS = {
    "--node R": "only this node",
    "--file NAME": "only this log: daemon, vllm, rollout, update, ...",
    "--attempt A": "logs of this start of the node (default: the latest)",
    "-n --lines N": "number of lines per log (default 20)",
    "--first-error": "show only the earliest failure on any node, with its context",
    "-f --follow": "keep printing new lines until Ctrl-C",
    "--answers": "print the answers of the run instead, the worst of the newest iteration first",
    "--filter NAME=VALUE*": "with --answers: only those with this split, iteration, task, reward_from, reward_to, length_from, "
    "length_to, cut_off, failed, node, version, set, words; may be repeated",
    "--order ORDER": "with --answers: worst, best, newest, longest, shortest or task",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, FLAGS, lines=20)


def main(args: argparse.Namespace) -> int:
    paths = flags.find_run(args).paths
    if args.first_error:
        return _first_error(paths)
    if args.answers:
        return _answers(paths, args)
    if args.filter or args.order:
        raise UsageError(f"--{'filter' if args.filter else 'order'}: is for --answers")

    def logs() -> list[Log]:
        return find_logs(paths, node=args.node, attempt=args.attempt, name=args.file)

    if not logs() and not args.follow:
        filters = {"--node": args.node, "--file": args.file, "--attempt": args.attempt}
        typed = [f"{flag} {value}" for flag, value in filters.items() if value is not None]
        flag = " ".join(typed) or f"--log-path {paths.root}"
        raise UsageError(f"{flag}: no matching logs in {paths.logs}")
    show(logs, args.lines, follows=lambda: bool(args.follow))
    return 0


def _first_error(paths: RunPaths) -> int:
    from fsbarrier.rundir.journal import read_events
    from fsbarrier.view.first_error import first_error

    lines = first_error(read_events(paths.root), paths.logs)
    print("\n".join(lines or ["no node, program or phase of this run has failed"]))
    return 0


def _answers(paths: RunPaths, args: argparse.Namespace) -> int:
    from fsbarrier.view.answers import ORDERS, AnswerIndex, Filter
    from fsbarrier.view.terminal_answers import answer_lines

    texts: dict[str, str] = {}
    for word in args.filter or ():
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--filter {word}: must be NAME=VALUE")
        texts[name] = value
    order = args.order or "worst"
    if order not in ORDERS:
        raise UsageError(f"--order {order}: must be one of {', '.join(ORDERS)}")
    index = AnswerIndex(paths)
    newest = {split: iterations[0] for split, iterations in index.iterations().items()}
    if "iteration" not in texts:
        # Without an iteration, the newest one, since that of all iterations may be a long list.
        split = texts.get("split") or next(iter(newest), "train")
        texts |= {"split": split, "iteration": str(newest.get(split, 0))}
    elif texts["iteration"] == "all":
        del texts["iteration"]
    wanted = Filter.from_texts(texts)
    chosen = sorted(index.matching(wanted, lambda done, total: True), key=ORDERS[order])
    for answer in chosen:
        print("\n".join(answer_lines(answer)), flush=True)
    if not chosen:
        print("no answer passes these filters")
    return 0
