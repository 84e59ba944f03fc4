"""Watch a run live until it ends, or until Ctrl-C, which does not stop the run. Without a terminal, print its events line by line."""

from __future__ import annotations

import argparse

from fsbarrier.cli.commands import flags

EXAMPLE = "fsbarrier top --log-path runs/default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)


def main(args: argparse.Namespace) -> int:
    from fsbarrier.view.live_view import follow

    log_path = flags.find_log_path(args)
    if follow(log_path) is not None:
        from fsbarrier.view.summary import print_summary

        print_summary(log_path)
    return 0
