"""Reads answers and appends turns with the package `renderers` instead of vLLM's parsers and the chat template: `rollout.renderer=NAME`.

The package is the user's choice and not among those that a run needs (docs/decisions/0032). The first prompt of a conversation is still
what the chat template renders. As a program it tries whether a renderer fits a model: `python -m fsbarrier.rollouts.renderer NAME FOLDER
ARGUMENTS`, the last a JSON object; exit code 2 and one line if it does not fit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fsbarrier.data.images import sources
from fsbarrier.errors import UsageError
from fsbarrier.rollouts.episode import TurnFailed
from fsbarrier.rollouts.samples import Message
from fsbarrier.settings.value_types import SWITCHES
from fsbarrier.user_code import log_once


class Renderer:
    """The package's renderer `name`, with the tokenizer of the model in `folder`. `arguments`: those of the chat template.

    Raises UsageError if the package has no such renderer, or it does not fit the tokenizer or the arguments.
    """

    def __init__(self, name: str, folder: Path, arguments: Mapping[str, object]) -> None:
        self._setting = f"rollout.renderer={name}"
        if name == "default":
            # It would render each conversation anew, and reads no calls.
            raise UsageError(f"{self._setting}: appends no turns; give rollout.renderer=template")
        try:
            package = import_module("renderers")
            # A turn is appended to what was sampled, so earlier thoughts stay.
            config = type(package.config_from_name(name))(thinking_retention="all")
            # `rollout.thinking` gives an argument under each of its usual names.
            known = package.template_field_names(config)
            given = {key: value for key, value in arguments.items() if key in known or key not in SWITCHES}
            tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(str(folder))
            self._renderer: Any = package.create_renderer(tokenizer, config, chat_template_kwargs=given)
        # The package and its tokenizers have no exception of their own.
        except Exception as error:
            raise UsageError(
                f"{self._setting}: the package renderers cannot use it for {folder}: {_line(error)}"
            ) from None

    def after_answer(
        self,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
    ) -> list[int] | None:
        """The tokens of the new `messages` after a sampled answer, up to where the next one begins; None if this renderer cannot append
        them. Raises TurnFailed."""
        if any(sources(messages)):
            raise TurnFailed(f"messages: {self._setting} appends texts only, and there is an image")
        before = [*prompt_ids, *answer_ids]
        try:
            rendered = self._renderer.bridge_to_next_turn(
                [*prompt_ids], [*answer_ids], [*messages], tools=[*tools] or None
            )
        except Exception as error:
            raise TurnFailed(f"messages: {self._setting} cannot append them: {_line(error)}") from None
        ids = [] if rendered is None else [int(token) for token in rendered.token_ids]
        return ids[len(before) :] if ids[: len(before)] == before else None

    def message(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, object]],
        prompt_ids: Sequence[int] | None,
    ) -> Mapping[str, object]:
        """A sampled answer as a message, as the server's parsers would give it; {} if it cannot be read.

        `open`: the answer ends within a thought.
        """
        try:
            read = self._renderer.parse_response(
                [*token_ids], tools=[*tools] or None, prompt_ids=None if prompt_ids is None else [*prompt_ids]
            )
        except Exception as error:
            log_once(
                self._setting, f"{self._setting} cannot read an answer, which stays text: {_line(error)}\n"
            )
            return {}
        calls = [call for call in read.tool_calls if tools and call.status == "ok"]
        # What is no call of an offered tool stays text.
        texts = (read.content, *(call.raw for call in read.tool_calls if call not in calls))
        return {
            "content": "\n".join(filter(None, texts)),
            "reasoning": read.reasoning_content,
            "open": read.reasoning_complete is False,
            "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls],
        }


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(name: str, folder: str, arguments: str) -> int:
    try:
        Renderer(name, Path(folder), json.loads(arguments))
    except UsageError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
