"""Show runs in a browser: state, nodes, curves, every answer, times, logs. Reads only; listens on loopback, with a key in the address."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.network.this_host import user_at_host
from fsbarrier.rundir.paths import RunPaths

EXAMPLE = """fsbarrier view /shared/runs
  fsbarrier view --log-path runs/default --port 8765"""
FLAGS = {"--port N": "the port of loopback to listen on (default: a free one)"}
#: the package that makes the page, and what brings it
LIBRARY, INSTALL = "nicegui", "pip install 'fsbarrier[view]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = (
        "a run directory, or a folder with several (default: the default --log-path, or the folder around it)"
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help=folder)
    flags.add(parser, {"--log-path P": "the run directory", **FLAGS})


def main(args: argparse.Namespace) -> int:
    folder, only = _what(args)
    if importlib.util.find_spec(LIBRARY) is None:
        raise UsageError(f"view: this environment lacks {LIBRARY}, which makes the page; type: {INSTALL}")
    listening = _listen(args.port)
    # NiceGUI reads what an application stored in the current folder unless it is told another one. This page stores nothing.
    os.environ["NICEGUI_STORAGE_PATH"] = os.devnull
    from fsbarrier.page import server
    from fsbarrier.page.app import build
    from fsbarrier.page.open_runs import OpenRuns

    key = server.new_key()
    application = build(OpenRuns(folder, only))
    port = listening.getsockname()[1]
    print(f"the page of {only or folder}: open this address in a browser on this machine")
    print(f"  http://{server.HOST}:{port}/?key={key}")
    print("from another machine, type this there first, and open the same address there")
    print(f"  ssh -L {port}:{server.HOST}:{port} {user_at_host()}")
    print("Ctrl-C ends the page; it does nothing to the runs", flush=True)
    server.serve(application, listening, key)
    return 0


def _what(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """The folder of the runs to show, and the run if the user named a single one (else None). Raises UsageError."""
    if args.folder and args.log_path:
        raise UsageError(f"{args.folder} and --log-path {args.log_path}: name one of them")
    named = preflight.absolute(args.folder or args.log_path) if args.folder or args.log_path else None
    folder = named or preflight.default_log_path(os.environ)
    if os.path.lexists(RunPaths(folder).record):
        return folder.parent, folder
    if named is None:
        folder = folder.parent
    if args.log_path:
        raise UsageError(
            f"--log-path {folder}: there is no run here; `fsbarrier view FOLDER` shows all runs of a folder"
        )
    if not folder.is_dir():
        raise UsageError(f"view {folder}: there is no such folder")
    return folder, None


def _listen(port: int | None) -> socket.socket:
    from fsbarrier.network.listening import on_loopback

    if port is not None and port > 65535:
        raise UsageError(f"--port {port}: must be at most 65535")
    try:
        return on_loopback(port or 0)
    except OSError as error:
        raise UsageError(
            f"--port {port}: cannot listen there: {error.strerror}; without --port a free one is taken"
        ) from None
