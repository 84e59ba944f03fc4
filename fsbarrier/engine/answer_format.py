"""Which parsers of vLLM read a model's answers, and how it marks its thoughts: recognised by its chat template, or named by the user.

Only the marks are known here. vLLM's own parsers are not used for these formats, because they end a thought at a call that is only
considered in it, and take an answer without thoughts for one (docs/decisions/0032).
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fsbarrier.engine.model import parser_of, template_of
from fsbarrier.engine.model import recognised as calls_of
from fsbarrier.settings.value_types import SWITCHES

if TYPE_CHECKING:
    from fsbarrier.settings.sections import RolloutSettings


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """`closed_with`: the text that closes a thought on the model's behalf. `around`: what the family writes around the answer that follows.

    `hidden`: the marks are special tokens, which vLLM leaves out of an answer's text unless asked. `calls_in_all`: the parser of tool calls
    needs the whole answer, with its thoughts. `also`: a template of this format has this mark too. `ends`: the token that ends a sampled
    answer, and the one that the template writes in its place in a history; None: they are the same.
    """

    name: str
    opening: str
    closing: str
    closed_with: str
    around: re.Pattern[str] | None = None
    hidden: bool = False
    calls_in_all: bool = False
    also: str = ""
    ends: tuple[str, str] | None = None


def _thinking(name: str, around: str | None = None, also: str = "") -> ThoughtFormat:
    pattern = None if around is None else re.compile(around, re.DOTALL)
    return ThoughtFormat(name, "<think>", "</think>", "\n</think>\n\n", pattern, also=also)


#: the format of nearly all families
USUAL = _thinking("deepseek_r1")
_HARMONY_ANSWER = r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>(?P<answer>.*)"
_FORMATS = (
    ThoughtFormat(
        "openai_gptoss",
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        closed_with="<|end|><|start|>assistant<|channel|>final<|message|>",
        around=re.compile(_HARMONY_ANSWER, re.DOTALL),
        hidden=True,
        calls_in_all=True,
        ends=("<|return|>", "<|end|>"),
    ),
    ThoughtFormat("gemma4", "<|channel>thought", "<channel|>", "\n<channel|>", hidden=True),
    ThoughtFormat("mistral", "[THINK]", "[/THINK]", "[/THINK]", hidden=True),
    ThoughtFormat("seed_oss", "<seed:think>", "</seed:think>", "</seed:think>"),
    ThoughtFormat(
        "cohere_command3",
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        closed_with="<|END_THINKING|><|START_RESPONSE|>",
        around=re.compile(r"<\|START_RESPONSE\|>(?P<answer>.*?)(?:<\|END_RESPONSE\|>.*)?", re.DOTALL),
        hidden=True,
    ),
    ThoughtFormat(
        "granite",
        opening="Here is my thought process:",
        closing="Here is my response:",
        closed_with="\n\nHere is my response:",
    ),
    _thinking("ernie45", r"\s*<response>\n?(?P<answer>.*?)(?:\n?</response>\s*)?", also="<response>"),
    _thinking("hunyuan_a13b", r"\s*<answer>\n?(?P<answer>.*?)(?:\n?</answer>\s*)?", also="<answer>"),
)
#: other names that vLLM has for parsers of `<think>`
_ALSO_USUAL = (
    *(
        "deepseek_v3",
        "glm45",
        "glm47",
        "granite_thinking_parser",
        "holo2",
        "hy_v3",
        "kimi_k2",
        "mimo",
        "minimax_m2",
    ),
    *("nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
)
BY_NAME = {
    **{marks.name: marks for marks in (*_FORMATS, USUAL)},
    **{name: _thinking(name) for name in _ALSO_USUAL},
}


def recognised(folder: Path | None) -> ThoughtFormat | None:
    """The format whose marks are in the model's template; None if there are none."""
    template = (template_of(folder) if folder is not None else None) or ""
    there = (
        marks
        for marks in (*_FORMATS, USUAL)
        if all(mark in template for mark in (marks.opening, marks.closing, marks.also))
    )
    return next(there, None)


def format_of(folder: Path | None, wanted: str | None) -> ThoughtFormat | None:
    """The format of the model in `folder`, or the one that the user named; None if vLLM's own parser of that name must read the
    thoughts."""
    return BY_NAME.get(wanted) if wanted is not None else recognised(folder) or USUAL


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of vLLM that the user has chosen, for tool calls and for thoughts; None: those that fit the model. `renderer`: the
    renderer of the package `renderers` that the rollout uses instead of them; None: no renderer."""

    tools: str | None = None
    reasoning: str | None = None
    renderer: str | None = None

    @classmethod
    def of(cls, settings: RolloutSettings) -> Self:
        return cls(settings.tool_parser, settings.reasoning_parser, settings.named_renderer)


NO_CHOICE = Parsers()


def known_parsers(package: str) -> list[str]:
    """The names of vLLM's parsers in its package `reasoning` or `tool_parsers`, read without importing it; [] if they are not found."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    source = (Path(spec.origin).parent / package / "__init__.py").read_text(encoding="utf-8")
    tables = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    )
    return [str(key.value) for table in tables for key in table.keys if isinstance(key, ast.Constant)]


def served_by(folder: Path, parsers: Parsers) -> Parsers:
    """The parsers that the server needs for the model in `folder`. Thoughts of known formats are read by their marks instead."""
    by_marks = format_of(folder, parsers.reasoning) is not None
    return Parsers(parser_of(folder, parsers.tools), None if by_marks else parsers.reasoning)


def told(folder: Path, parsers: Parsers, *, agent: bool) -> list[str]:
    """How the answers of the model in `folder` are read, in words, as far as it matters. `agent`: there is one, so tools may be called."""
    if parsers.renderer is not None:
        appended = ", and turns appended," if agent else ""
        return [f"answers: read{appended} by the renderer {parsers.renderer} (rollout.renderer)"]
    wanted, known = parsers.reasoning, recognised(folder)
    marks, lines = format_of(folder, wanted), list[str]()
    if wanted or known or agent:
        how = f"by their marks {marks.opening} and {marks.closing}" if marks else f"by vLLM's parser {wanted}"
        lines.append(f"thoughts: read {how} ({_why('rollout.reasoning_parser', wanted, known)})")
    if agent:
        parser = parser_of(folder, parsers.tools)
        why = _why("rollout.tool_parser", parsers.tools, calls_of(folder))
        lines.append(
            f"calls of tools: read by vLLM's parser {parser} ({why}); turns: appended as the chat template writes them"
        )
    return lines


def _why(setting: str, wanted: object, known: object) -> str:
    return setting if wanted else "by the chat template" if known else "the chat template names none"


def switches_in(folder: Path) -> list[str]:
    """Which of SWITCHES the template reads."""
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        source = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", template_of(folder) or "")
        read = find_undeclared_variables(environment.parse(source))
    except TemplateError:
        return []
    return [name for name in SWITCHES if name in read]
