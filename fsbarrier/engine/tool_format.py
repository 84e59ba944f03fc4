"""Chooses vLLM's parser for a model's tool calls, by the markup that the model's chat template writes for them."""

from __future__ import annotations

import json
from pathlib import Path

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
        added = _object(folder / "tokenizer.json").get("added_tokens")
        texts = (
            {one.get("content") for one in added if isinstance(one, dict)}
            if isinstance(added, list)
            else set()
        )
        if not texts.issuperset(needed):
            return None
    return name or None


def template_of(folder: Path) -> str | None:
    """The text of a folder's chat template; None if there is none, or several."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            if name.endswith(".jinja"):
                return (folder / name).read_text(encoding="utf-8", errors="replace")
            found = _object(folder / name).get("chat_template")
            return found if isinstance(found, str) else None
    found = _object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) and found else None


def _object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
