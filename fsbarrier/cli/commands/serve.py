"""Serve a policy that a run has trained, or a model folder, over an OpenAI-compatible API on this machine, until Ctrl-C.

Only this machine can connect, and only with the key that is printed. The server has everything that a run with --debug-mode needs.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from fsbarrier.cli.commands import flags
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.processes.signals import end, ending_signals_handled
from fsbarrier.wording import printable

if TYPE_CHECKING:
    from fsbarrier.cli.start.policy_export import VersionToExport
    from fsbarrier.settings.sections import Settings

EXAMPLE = "fsbarrier serve --log-path runs/default --version 6 --port 8000"
FLAGS = {
    "--version V": "policy version (default: the one the run serves now; 0: the initial model)",
    "--model M": "serve this model folder instead of a run's policy",
    "--port N": "port of 127.0.0.1 (default: a free one)",
    "--api-key-env NAME": "environment variable with the key that clients must send (default: a new key, which is printed)",
    **flags.TRUST,
    "--json": "print address and key as JSON",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, FLAGS)
    flags.add_settings(parser, "engine.max_model_len=4096")


def main(args: argparse.Namespace) -> int:
    from fsbarrier.cli.start import trained_policy
    from fsbarrier.engine.openai_http import base_and_socket
    from fsbarrier.network.port_forward import HOST, forward

    flags.take_settings(args)
    if args.port is not None and not 0 < args.port < 65536:
        raise UsageError(f"--port {args.port}: must be 1 to 65535")
    key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
    if args.api_key_env and not key:
        raise UsageError(f"--api-key-env {args.api_key_env}: this variable is not set; export it")
    chosen, named, settings = _what(args)

    def tell(port: int) -> None:
        url = f"http://{HOST}:{port}/v1"
        if args.json:
            told = {"url": url, "api_key": info.api_key, "model": info.model, "serves": named}
            print(json.dumps(told), flush=True)
            return
        print(f"{named} is served as {info.model!r} until Ctrl-C:", flush=True)
        shown = f"${args.api_key_env}" if args.api_key_env else info.api_key
        print(f"  export OPENAI_BASE_URL={url} OPENAI_API_KEY={shown}", flush=True)

    with ending_signals_handled(end):
        flags.say(f"starting vLLM with {named}; this takes half a minute, or longer for a large model")
        with trained_policy.served(chosen, settings, api_key=key) as (info, engine):
            _, socket_path = base_and_socket(info.url)
            forward(str(socket_path), args.port or 0, ready=tell, lives=lambda: not engine.ended)
            raise ProgramFailed(engine.how_it_ended())


def _what(args: argparse.Namespace) -> tuple[VersionToExport, str, Settings]:
    """The policy version or the model to serve, how messages name it, and the settings. Raises UsageError, ProgramFailed."""
    from fsbarrier.cli.start import model_folder, trained_policy
    from fsbarrier.cli.start.policy_export import VersionToExport
    from fsbarrier.settings.resolve import resolve
    from fsbarrier.settings.sections import known_names
    from fsbarrier.settings.sources import from_words

    if args.model is not None:
        for flag in ("run_folder", "log_path", "version"):
            if getattr(args, flag) is not None:
                raise UsageError("--model: serves a folder and no policy of a run; drop one of the two")
        folder = model_folder.find_model(args.model, None, os.environ)
        settings = resolve(from_words(args.settings, known_names()), cross_checks=False)
        return VersionToExport(0, folder), printable(f"model {folder}"), settings
    trusts = {"shared_group": args.shared_group, "trust_mount": args.trust_mount}
    policy = trained_policy.find(flags.find_log_path(args), args.version, **trusts)
    return policy.chosen, printable(policy.named), policy.settings(args.settings)
