"""Chooses vLLM's parser for a model's tool calls, by the markup that the model's chat template writes for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsbarrier.store import reading

#: the parser of the most usual format: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`
USUAL = "hermes"
# Parser, marks, tokens. The first parser whose marks are all in the template is chosen; a mark is a token or a text of the format. Without
# the tokens in the last column, vLLM would not start with this parser.
_FORMATS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("deepseek_v32", ("｜DSML｜",), ()),
    (
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "```json"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",), ()),
    ("minimax_m2", ("<minimax:tool_call>",), ()),
    ("seed_oss", ("<seed:tool_call>",), ()),
    ("openai", ("<|channel|>", "<|call|>"), ()),
    ("gemma4", ("<|tool_call>",), ()),
    ("functiongemma", ("<start_function_call>",), ()),
    ("glm45", ("<arg_key>",), ()),
    ("qwen3_coder", ("<tool_call>", "<function="), ()),
    ("lfm2", ("<|tool_call_start|>",), ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),
    ("olmo3", ("<function_calls>",), ()),
    ("llama3_json", ("<|python_tag|>",), ("<|python_tag|>",)),
    ("phi4_mini_json", ("functools[",), ()),
    ("hermes", ("<tool_call>",), ()),
    ("granite", ("<|tool_call|>",), ()),
)


def parser_of(folder: Path, wanted: str | None) -> str:
    """The parser for the model in `folder`; `wanted`: the user's choice."""
    return wanted or recognised(folder) or USUAL


def recognised(folder: Path) -> str | None:
    """The parser of the model in `folder`, by its template; None if the template has no known format."""
    template = template_of(folder) or ""
    fitting = (one for one in _FORMATS if all(mark in template for mark in one[1]))
    name, _, needed = next(fitting, ("", (), ()))
    if needed:
        added = object_in(folder / "tokenizer.json").get("added_tokens")
        texts = (
            {one.get("content") for one in added if isinstance(one, dict)}
            if isinstance(added, list)
            else set()
        )
        if not texts.issuperset(needed):
            return None
    return name or None


def template_of(folder: Path) -> str | None:
    """The text of a folder's chat template; the one called "default" if there are several; None if there is none."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    if (folder / "chat_template.json").is_file():
        template = object_in(folder / "chat_template.json").get("chat_template")
        return template if isinstance(template, str) else None
    template = object_in(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def object_in(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model's folder; empty if the file is missing or is not one."""
    try:
        return reading.json_object(path, ValueError)
    except ValueError:
        return {}
