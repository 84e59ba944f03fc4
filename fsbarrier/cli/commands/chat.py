"""Talk to a policy that a run has trained, or to the server at --url: a line is a message, an empty line begins a new conversation.

The run's own settings say how it answers: chat template, temperature, length. Ctrl-D or Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsbarrier.cli.commands import flags
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.processes.signals import end, ending_signals_handled
from fsbarrier.wording import printable

if TYPE_CHECKING:
    from fsbarrier.engine.client import EngineClient
    from fsbarrier.settings.sections import Settings

EXAMPLE = "fsbarrier chat --log-path runs/default --version 6 rollout.temperature=0"
PROMPT = "> "
#: how long one answer may take
ANSWER_S = 3600.0
FLAGS = {
    "--version V": "policy version (default: the one the run serves now; 0: the initial model)",
    "--url URL": "talk to this server, such as that of `fsbarrier serve`, and start none",
    "--api-key-env NAME": "with --url: environment variable with its key",
    "--system TEXT": "the system message of each conversation",
    **flags.TRUST,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, FLAGS)
    flags.add_settings(parser, "rollout.temperature=0")


def main(args: argparse.Namespace) -> int:
    from fsbarrier.cli.start import trained_policy
    from fsbarrier.engine.client import EngineClient
    from fsbarrier.engine.model import template_of

    flags.take_settings(args)
    trusts = {"shared_group": args.shared_group, "trust_mount": args.trust_mount}
    policy = trained_policy.find(flags.find_log_path(args), args.version, **trusts)
    settings = policy.settings(args.settings)
    if args.url:
        settings = replace(
            settings, engine=replace(settings.engine, url=args.url, api_key_env=args.api_key_env)
        )
    model = policy.chosen.model
    chats = template_of(model) is not None
    if args.system is not None and not chats:
        raise UsageError(
            f"--system: the model {model} has no chat template, so it is given no system message; drop it"
        )
    external = not settings.manages_engine
    with ending_signals_handled(end):
        if not external:
            flags.say(
                f"starting vLLM with {printable(policy.named)}; this takes half a minute, or longer for a large model"
            )
        with trained_policy.served(policy.chosen, settings, external=external) as (info, _):
            if info.note:
                flags.say(printable(info.note))
            client = EngineClient(info.url, info.api_key)
            for answer in _answers(client, info.model, settings, args.system, chats=chats):
                print("\n".join(map(printable, answer.split("\n"))), flush=True)
    return 0


def _answers(
    client: EngineClient, model: str, settings: Settings, system: str | None, *, chats: bool
) -> Iterator[str]:
    """The policy's answer to each line of the input. `chats`: the model has a chat template; without one, a line is a prompt that is
    continued."""
    begin = [{"role": "system", "content": system}] if system else []
    messages = [*begin]
    flags.say(
        "talk to the policy" if chats else "this model has no chat template: each line is continued by itself"
    )
    for line in _lines():
        if not line.strip():
            messages = [*begin]
            continue
        messages.append({"role": "user", "content": line})
        answer = _ask(client, model, settings, messages if chats else line)
        messages.append({"role": "assistant", "content": answer})
        yield answer


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    # Lets the user edit the line.
    import readline  # noqa: F401

    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return


def _ask(client: EngineClient, model: str, settings: Settings, given: str | list[dict[str, str]]) -> str:
    """One answer. Raises ProgramFailed if the server refuses or is gone."""
    from fsbarrier.engine.client import Refused, Unreachable

    rollout = settings.rollout
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": rollout.max_tokens,
        "temperature": rollout.temperature,
    }
    body |= {"stop": [*rollout.stop]} if rollout.stop else {}
    if isinstance(given, str):
        path, body = "/v1/completions", {**body, "prompt": [given], "n": 1}
    else:
        arguments = rollout.template_arguments
        path, body = "/v1/chat/completions", {**body, "messages": given, "chat_template_kwargs": arguments}
    try:
        reply: Any = client.call("POST", path, body, timeout_s=ANSWER_S, cancel=threading.Event())
        choice = reply["choices"][0]
        return str(choice["text"] if isinstance(given, str) else choice["message"]["content"] or "")
    except (Refused, Unreachable) as error:
        raise ProgramFailed(f"the policy did not answer: {error}") from None
    except (LookupError, TypeError):
        raise ProgramFailed(
            f"{client.url}{path}: the response has no answer; is this a vLLM server?"
        ) from None
