"""`rollout.renderer=NAME`: answers are read, and turns appended, by the package `renderers`; its own one where it is installed, else a
stand-in. Against a stand-in server (fake_vllm.py) whose tokens are letters."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_rollout import Run, command, make_spec, outcome, rolled_out, start_fake

REPO = Path(__file__).resolve().parent.parent
#: the special tokens of Qwen3 that its renderer asks for; the stand-in server ends an answer with token 1
SPECIAL = {
    **{"<|im_end|>": 1, "<|im_start|>": 200, "<|endoftext|>": 201, "<think>": 202, "</think>": 203},
    **{"<tool_call>": 204, "</tool_call>": 205, "<tool_response>": 206, "</tool_response>": 207},
}
#: what it does with `renderers`' names, in one family's format that is none: `#NAME`, and thoughts before `|`
STAND_IN = """
from types import SimpleNamespace as Made

class Config:
    def __init__(self, thinking_retention=None):
        assert thinking_retention in (None, "all")

class Renderer:
    def __init__(self, arguments):
        self.arguments = arguments

    def parse_response(self, ids, *, tools=None, prompt_ids=None):
        text = "".join(map(chr, ids)).removesuffix("\\1")
        if "oops" in text:
            raise KeyError("oops")
        thought, bar, said = text.rpartition("|")
        said, sharp, name = said.partition("#")
        status = "ok" if name.isalpha() else "malformed_structure"
        calls = [Made(name=name, arguments={"a": 2}, status=status, raw="#" + name)] if sharp else []
        opened = bool(prompt_ids) and chr(prompt_ids[-1]) == ":"
        done = bool(bar) or "half" not in text
        return Made(
            content=said if done else "", reasoning_content=(thought or None) if done else text, tool_calls=calls,
            reasoning_complete=opened and done,
        )

    def bridge_to_next_turn(self, prompt, answer, messages, *, tools=None):
        said = messages[-1]["content"]
        if "fork" in said:
            return None
        if "break" in said:
            raise ValueError("no such role")
        text = f"({len(answer)} {self.arguments} {len(tools or [])}){said}\\na:"
        return Made(token_ids=[*prompt, *answer, *map(ord, text)])

def config_from_name(name):
    if name != "letters":
        raise ValueError(f"Unknown renderer {name!r}. Available: letters")
    return Config()

def template_field_names(config):
    return {"thinking", "style"}

def create_renderer(tokenizer, config, *, chat_template_kwargs=None):
    if set(chat_template_kwargs) - {"thinking", "style"}:
        raise ValueError(f"Unsupported chat_template_kwargs: {sorted(chat_template_kwargs)}")
    assert tokenizer.encode("b", add_special_tokens=False) == [98]
    return Renderer(chat_template_kwargs)
"""
AGENT = """
from fsbarrier.rollouts.agents import Trajectory

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

class Two:
    async def run(self, task, client):
        first, second = task.prompt.split(" then ")
        messages = [{"role": "user", "content": first}]
        reply = await client.chat(messages, tools=TOOLS)
        if reply.tool_calls:
            (call,) = reply.tool_calls
            assert call["function"]["name"] == "f", call
            later = {"role": "tool", "tool_call_id": call["id"], "content": second}
        else:
            later = {"role": "user", "content": second}
        messages += [reply.message, later]
        reply = await client.chat(messages, tools=TOOLS)
        return Trajectory(metadata={"said": [m["content"] for m in messages], "calls": len(reply.tool_calls)})
"""


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are letters, and the special ones of Qwen3."""
    import tokenizers
    import transformers

    vocab = {chr(code): code for code in (10, *range(32, 127))} | SPECIAL
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        additional_special_tokens=[*SPECIAL],
        clean_up_tokenization_spaces=False,
    )
    made.save_pretrained(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path / "model"


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a module `renderers`."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "renderers.py").write_text(STAND_IN)
    return tmp_path / "packages"


Sample = Callable[..., Run]


@pytest.fixture
def sample(tmp_path: Path, model: Path) -> Sample:
    """Rolls out, against a server of its own."""
    (tmp_path / "agent.py").write_text(AGENT)
    server = start_fake(tmp_path / "fake", length=900)

    def roll_out(
        name: str, prompts: list[str], *, path: Path | None, agent: bool = True, **changes: Any
    ) -> Run:
        chosen = {
            "rollout.renderer": name,
            "rollout.max_tokens": 99,
            "sampling": {"max_tokens": 99, "samples": 1},
            "model": str(model),
            **({"rollout.agent": f"{tmp_path / 'agent.py'}:Two"} if agent else {}),
            **changes,
        }
        spec = make_spec(tmp_path, server.url, prompts, **chosen)
        own = os.environ.get("PYTHONPATH", "")
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, filter(None, (path, REPO))), own])}
        done = subprocess.run(command(spec), env=environ, capture_output=True, text=True, cwd=REPO)
        return outcome(done.returncode, done.stderr, spec)

    yield roll_out
    server.process.kill()
    server.process.communicate()


def text_of(row: dict[str, Any]) -> str:
    """All tokens, those that were sampled in brackets."""
    text, earlier = "", 0
    for token, mask in zip(row["token_ids"], row["loss_mask"], strict=True):
        text += ("[" if mask > earlier else "]" if mask < earlier else "") + chr(token)
        earlier = mask
    return text + "]" * earlier


def test_turns_are_appended_and_answers_read_by_the_renderer(
    tmp_path: Path, sample: Sample, stand_in: Path
) -> None:
    prompts = [
        "q!say hm|so#f!! then !say |yes#3!!",
        # No turn is appended: a segment begins.
        "r!say ok!! then fork !say x!!",
        # What cannot be read is text; half a thought is no answer.
        "s!say oops!! then !say y!!",
        "t!say half!! then !say z!!",
        "u!say no!! then break",
    ]
    words = {
        "rollout.chat_template_kwargs": "style=2",
        "rollout.thinking": "on",
        "rollout.max_error_share": 0.3,
    }
    done = sample("letters", prompts, path=stand_in, **words)
    rows = [row for _, (row,) in sorted(rolled_out(tmp_path).items())]
    assert done.code == 0, done.stderr
    whole, forked, unread, half, refused = rows
    appended = "(8 {'thinking': True, 'style': 2} 1)!say |yes#3!!\na:"
    assert text_of(whole) == f"1 tools\nu:q!say hm|so#f!!\na:[hm|so#f\x01]{appended}[|yes#3\x01]"
    call, last = whole["messages"][1], whole["messages"][-1]
    assert (call["content"], call["reasoning_content"]) == ("so", "hm")
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 2}'}
    # A call that is none stays in the text.
    assert (last["content"], whole["metadata"]["calls"], whole["text"]) == ("yes\n#3", 0, "yes\n#3")
    assert whole["turns"] == 2 and not any("segments" in row for row in (whole, unread, half))
    assert list(forked["segments"]) == [0, forked["prompt_tokens"] + len("ok\x01")]
    assert [row["metadata"]["said"][1] for row in (forked, unread, half)] == ["ok", "oops", ""]
    assert "rollout.renderer=letters cannot read an answer, which stays text: 'oops'" in done.stderr
    assert not refused["valid"] and "rollout.renderer=letters cannot append them: no such role" in done.stderr
    assert all(row["valid"] for row in rows[:-1])


@pytest.mark.slow
def test_single_answers_are_read_by_the_renderer_too(tmp_path: Path, sample: Sample, stand_in: Path) -> None:
    done = sample("letters", ["q !say hm|so#f!!"], path=stand_in, agent=False)
    assert (done.code, done.stderr) == (0, "")
    ((row,),) = rolled_out(tmp_path).values()
    # Nobody has offered a tool.
    assert (row["text"], row["reasoning"]) == ("so\n#f", "hm")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("renderers") is None, reason="needs the package renderers")
def test_the_package_itself(tmp_path: Path, sample: Sample) -> None:
    mark = {name: chr(token) for name, token in SPECIAL.items()}
    call = (
        f"{mark['<tool_call>']}\n{json.dumps({'name': 'f', 'arguments': {'a': 2}})}\n{mark['</tool_call>']}"
    )
    thought = f"{mark['<think>']}\nhm\n{mark['</think>']}\n\n"
    done = sample("qwen3", [f"q!say {thought}{call}!! then !say yes!!"], path=None)
    assert (done.code, done.stderr) == (0, "")
    ((row,),) = rolled_out(tmp_path).values()
    first, last = row["messages"][1], row["messages"][-1]
    assert (first["reasoning_content"], first["content"]) == ("hm", "")
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 2}'}
    assert (last.get("reasoning_content"), last["content"]) == (None, "yes")
    begin, end = mark["<|im_start|>"], mark["<|im_end|>"]
    result = f"{mark['<tool_response>']}\n!say yes!!\n{mark['</tool_response>']}"
    appended = f"\n{begin}user\n{result}{end}\n{begin}assistant\n"
    assert text_of(row).endswith(f"a:[{thought}{call}{end}]{appended}[yes{end}]")
    assert row["turns"] == 2 and "segments" not in row
