"""Evaluate a policy that a run has trained on held-out tasks, with the run's settings: its engine, its agent, its reward.

Starts an engine on this machine; the run may go on meanwhile if there are accelerators to spare.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.wording import printable

EXAMPLE = "fsbarrier eval --log-path runs/default --version 6 --data hard.jsonl eval.samples=8"
FLAGS = {
    "--version V": "policy version (default: the one the run serves now; 0: the initial model)",
    "--data F": "evaluate on this task file, or this folder's test file (default: the run's held-out tasks)",
    "--out FILE": "also write the trajectories to this .jsonl or .parquet file",
    **flags.TRUST,
    "--json": "print JSON",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, FLAGS)
    flags.add_settings(parser, "eval.samples=8")


def main(args: argparse.Namespace) -> int:
    from rich.console import Console

    from fsbarrier.cli.launchers import local
    from fsbarrier.cli.start import begin, policy_export, ranks, trained_policy
    from fsbarrier.data import tables
    from fsbarrier.store.local_folders import scratch_dir, user_dir

    flags.take_settings(args)
    out = preflight.absolute(args.out) if args.out else None
    if out is not None and out.suffix not in tables.SUFFIXES:
        raise UsageError(f"--out {out}: must end in {' or '.join(tables.SUFFIXES)}")
    trusts = {"shared_group": args.shared_group, "trust_mount": args.trust_mount}
    policy = trained_policy.find(flags.find_log_path(args), args.version, **trusts)
    data = preflight.absolute(args.data) if args.data else None
    if data is not None and not data.exists():
        raise UsageError(f"--data {data}: no such file or folder")
    environ = ranks.without_launchers(os.environ)
    with scratch_dir(user_dir(), "eval") as folder:
        model = policy_export.made_whole(policy.chosen, folder / "model")
        chosen, kept = trained_policy.evaluation(policy, model, args.settings, data, folder / "evaluation")
        request = begin.Request(chosen=chosen, environ=environ, master=True, defaults=kept)
        start = begin.begin(request, flags.say)
        flags.say(f"evaluating {printable(policy.named)}")
        # What the run reports goes to stderr, so that stdout has the result alone.
        output = Console(stderr=True, highlight=False)
        code = local.run_started(start, environ, flags.say, lambda: None, output, next_step="")
        if code:
            return code
        figures = _figures(folder / "evaluation")
        if out is not None:
            sources, _ = tables.sources(folder / "evaluation", "test", None)
            tables.export(sources, out)
    result = {"run_id": policy.record.run_id, "policy_version": policy.chosen.version, **figures}
    if args.json:
        print(json.dumps({**result, "out": str(out) if out is not None else None}))
    else:
        print(_in_words(policy.named, figures))
    return 0


def _figures(log_path: Path) -> dict[str, float]:
    """The number of tasks and trajectories, and what the evaluation measured, by the names that a run's journal has."""
    from fsbarrier.view.report_formats import MEASURES
    from fsbarrier.view.run_status import look_once

    reader, _ = look_once(log_path)
    event = next(iter(reader.history.reports("evaluated").values()))
    names = ("groups", "trajectories", "unjudged", "truncated_share", "answer_tokens_mean", "reward_mean")
    measured = [name for name in event.fields if MEASURES["evaluated"][1].fullmatch(name)]
    values = {name: event.number(name) for name in (*names, *measured)}
    return {
        "tasks" if name == "groups" else name: value for name, value in values.items() if value is not None
    }


def _in_words(named: str, figures: dict[str, float]) -> str:
    from fsbarrier.wording import amount

    lines = [f"{printable(named)}: {figures['tasks']:.0f} tasks, {figures['trajectories']:.0f} trajectories"]
    shown = [name for name in figures if name.startswith("reward") or "_at_" in name or "/" in name]
    for name in shown:
        if not name.endswith("_se"):
            error = figures.get("reward_se" if name == "reward_mean" else f"{name}_se")
            value = amount(figures[name]) + (f" ± {amount(error)}" if error is not None else "")
            lines.append(f"  {printable(name):<20} {value}")
    return "\n".join(lines)
