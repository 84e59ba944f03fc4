"""A turn goes on from the one before under the templates that models come with, also those that render the past differently; images."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fsbarrier.data import images
from fsbarrier.engine.answer_format import USUAL
from fsbarrier.rollouts.agent_client import Recorder
from fsbarrier.rollouts.answers import ThoughtMarks
from fsbarrier.rollouts.episode import TurnFailed
from fsbarrier.rollouts.pictures import Pictures
from fsbarrier.rollouts.samples import Refusal, Sample, Sampling
from fsbarrier.rollouts.thinking import Thinking

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
INSTRUCT = (  # no words of its own before an answer
    "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
STRICT = "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 == 1 %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
SILENT = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}:"
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|call|>",
    "</a>",
)


def tokenized(text: str) -> list[int]:
    """A token a letter, but for special ones."""
    for number, word in enumerate(SPECIAL):
        text = text.replace(word, chr(0xE000 + number))
    return [*map(ord, text)]


class Engine:
    """Stands for the Sampler: renders a template, and answers as told."""

    longest, renderer = 10_000, None

    def __init__(self, template: str, answers: list[str]) -> None:
        jinja2 = pytest.importorskip("jinja2")
        environment = jinja2.Environment()

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        self.template, self.answers = environment.from_string(template), answers
        self.error = jinja2.TemplateError
        self.sampling = Sampling(1, 1.0, 1.0, -1, 1000)
        self.prompts: list[list[int]] = []
        self.pictures = Pictures(None, None)
        self.shown: dict[str, bool] = {}

    async def tokens(self, **body: Any) -> list[int]:
        try:
            return tokenized(self.template.render(**body))
        except self.error as error:
            raise Refusal(str(error)) from None

    async def thinking(self) -> Thinking:
        return Thinking(USUAL, ThoughtMarks([], [-1], []), None)

    async def read_message(self, token_ids: list[int], _tools: Any, _prompt: Any) -> dict[str, Any]:
        text = "".join(chr(one) for one in token_ids if one < 0xE000)
        content, mark, name = text.partition("@")
        call = {"function": {"name": name, "arguments": {}}}
        return {"content": content, "tool_calls": [call] if mark else []}

    async def turn(self, prompt: list[int], _images: list[str], **_: Any) -> tuple[list[int], Sample]:
        self.prompts.append(list(prompt))
        ids = tokenized(self.answers.pop(0))
        text = "".join(chr(i) for i in ids if i < 0xE000)
        return prompt, Sample(text, ids, [-1.0] * len(ids), "stop", 0.1)


def turns(template: str, end: str, answers: tuple[str, ...] = ("yes", "no", "so")) -> tuple[Recorder, Engine]:
    engine = Engine(template, [answer + end for answer in answers])

    async def go() -> Recorder:
        client = Recorder(engine)  # type: ignore[arg-type]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "first"}]
        for number in range(3):
            messages += [(await client.chat(messages)).message, {"role": "user", "content": f"then {number}"}]
        return client

    return asyncio.run(go()), engine


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (LLAMA, "<|eot|>"), (INSTRUCT, "</s>"), (PLAIN, ""), (CHATML, "")],
    ids=["chatml", "llama", "instruct", "plain", "stopped by a word"],
)
def test_what_is_recorded_is_what_the_template_makes_of_it(template: str, end: str) -> None:
    client, engine = turns(template, end)
    (segment,) = client.segments
    for earlier, later in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    rendered = asyncio.run(engine.tokens(messages=segment.history, add_generation_prompt=False))
    spaces = [
        i for i in segment.token_ids if i != 32
    ]  # INSTRUCT puts one before an answer; the model said none
    assert spaces == [i for i in rendered if i != 32][: len(spaces)]
    assert sum(segment.loss_mask) == 3 * bool(end) + len("yesnoso")


@pytest.mark.parametrize("template", [STRICT, SILENT], ids=["refuses", "leaves answers out"])
def test_with_a_template_that_cannot_be_continued_each_turn_is_a_segment(template: str) -> None:
    if template is STRICT:
        template = CHATML + STRICT.replace("loop.index0 == 1", "m.content in ('A', 'B')")
    client, engine = turns(template, "")
    assert len(client.segments) == 3
    for segment, prompt in zip(client.segments, engine.prompts, strict=True):
        assert segment.token_ids[: len(prompt)] == prompt
    assert json.dumps(client.segments[2].history).count("assistant") == 3


def test_a_result_follows_its_call_under_a_template_that_refuses_it_alone() -> None:
    """The call of the answer itself stands in, and what follows begins behind the end that the policy has sampled."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}@{{ c.function.name }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    engine = Engine(template, ["hm@add<|im_end|>", "5<|im_end|>"])

    async def go() -> Recorder:
        client = Recorder(engine)  # type: ignore[arg-type]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "2+3"}]
        tools = [{"type": "function", "function": {"name": "add"}}]
        first = await client.chat(messages, tools=tools)
        result = {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "5"}
        await client.chat([*messages, first.message, result], tools=tools)
        return client

    (segment,) = asyncio.run(go()).segments
    rendered = asyncio.run(engine.tokens(messages=segment.history, add_generation_prompt=False))
    assert segment.token_ids == rendered[: len(segment.token_ids)]


ANSWERS = "{% if m.role == 'assistant' %}[a]{{ m.content }}{% for c in m.tool_calls or [] %}@{{ c.function.name }}{% endfor %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
#: the result of a call is written into the turn that has made it, which goes on after it
RESULT_IN_THE_TURN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[a]{% for c in m.tool_calls or [] %}@{{ c.function.name }}<|call|>"
    "{% for r in messages[loop.index:] if r.role == 'tool' %}={{ r.content }};{% endfor %}{% endfor %}"
    "{% if m.content %}{{ m.content }}<|im_end|>\n{% endif %}{% elif m.role == 'user' %}[u]{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}[a]{% endif %}"
)
#: a turn ends with two tokens, which the model says both
TWO_ENDS = (
    "{% for m in messages %}"
    + ANSWERS
    + "</a><|im_end|>\n{% else %}[{{ m.role[0] }}]{{ m.content }}\n{% endif %}"
    + PROMPT
)
#: there is no place for the result of a call
WITHOUT_TOOLS = (
    "{% for m in messages %}"
    + ANSWERS
    + "<|im_end|>\n{% elif m.role == 'user' %}[u]{{ m.content }}\n{% endif %}"
    + PROMPT
)


def call_and_result(template: str, said: str) -> Recorder:
    engine = Engine(template, [said, "five<|im_end|>"])

    async def go() -> Recorder:
        client = Recorder(engine)  # type: ignore[arg-type]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "2+3"}]
        tools = [{"type": "function", "function": {"name": "add"}}]
        first = await client.chat(messages, tools=tools)
        result = {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "5"}
        await client.chat([*messages, first.message, result], tools=tools)
        return client

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("template", "said", "text"),
    [
        (RESULT_IN_THE_TURN, "hm@add<|call|>", "[u]2+3\n[a]hm@add<|call|>=5;five<|im_end|>"),
        (TWO_ENDS, "hm@add</a><|im_end|>", "[u]2+3\n[a]hm@add</a><|im_end|>\n[t]5\n[a]five<|im_end|>"),
    ],
    ids=["the result is in the turn", "a turn has two ends"],
)
def test_a_result_of_a_call_is_where_the_template_writes_it(template: str, said: str, text: str) -> None:
    (segment,) = call_and_result(template, said).segments
    assert segment.token_ids == tokenized(text)
    asked, answered = len(tokenized("[u]2+3\n[a]")), len(tokenized(said))
    assert segment.loss_mask[: asked + answered] == [0] * asked + [1] * answered
    assert sum(segment.loss_mask) == answered + len(tokenized("five<|im_end|>"))


def test_a_message_that_a_template_leaves_out_is_refused() -> None:
    with pytest.raises(TurnFailed, match="message 3: the chat template leaves out what the role 'tool' says"):
        call_and_result(WITHOUT_TOOLS, "hm@add<|im_end|>")


SEEING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text or '<\u2591>' }}{% endfor %}{% endif %}<|im_end|>{% endfor %}[assistant]"
)


class Sees(Engine):
    """An engine in which an image becomes three tokens. It remembers what it was shown."""

    def __init__(self, folder: Path, answers: list[str]) -> None:
        super().__init__(SEEING, answers)
        self.pictures = Pictures(folder, ord("\u2591"))
        self.sent: list[list[str]] = []

    async def turn(self, prompt: list[int], images: list[str], **_: Any) -> tuple[list[int], Sample]:
        self.sent.append(list(images))
        _, sample = await super().turn(prompt, images)
        request = self.pictures.request(self.pictures.collapsed(prompt), images)
        assert isinstance(request["token_ids"], list)
        expanded = [[one] * 3 if one == ord("\u2591") else [one] for one in request["token_ids"]]
        return [one for run in expanded for one in run], sample


def test_each_turns_image_stays_where_it_was_in_the_tokens(tmp_path: Path) -> None:
    """In the form of transformers, in OpenAI's, and in the result of a tool. What is recorded names the file that is kept."""
    from PIL import Image

    pictures = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(pictures):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(path)
    url = "data:image/png;base64," + base64.b64encode(pictures[1].read_bytes()).decode()
    shown = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image", "image": str(pictures[0])}],
        },
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
        {
            "role": "tool",
            "content": [{"type": "image", "image": str(pictures[2])}, {"type": "text", "text": "!"}],
        },
    ]
    engine = Sees(tmp_path / "kept", ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])

    async def go() -> Recorder:
        client = Recorder(engine)  # type: ignore[arg-type]
        messages: list[dict[str, Any]] = []
        for message in shown:
            messages.append(message)
            messages.append((await client.chat(messages)).message)
        return client

    (segment,) = asyncio.run(go()).segments
    names = [hashlib.sha256(path.read_bytes()).hexdigest() + ".png" for path in pictures]
    assert engine.sent == [names[:1], names[:2], names] and segment.images == names
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted(names)
    kept = [
        part["image"] for m in segment.history for part in images.parts_of(m["content"]) if "image" in part
    ]
    assert kept == names
    text = "".join(chr(one) for one in segment.token_ids if one < 0xE000)
    place = "<\u2591\u2591\u2591>"
    assert text == f"[user]see{place}[assistant]a[user]{place}[assistant]b[tool]{place}![assistant]c"


def test_an_image_is_kept_once_under_its_digest_upright_and_without_transparency(tmp_path: Path) -> None:
    from PIL import Image

    plain = Image.new("RGB", (3, 2), "red")
    plain.save(tmp_path / "plain.png")
    data = (tmp_path / "plain.png").read_bytes()
    name = images.keep(tmp_path / "kept", images.data_of(str(tmp_path / "plain.png")))
    assert name == images.keep(tmp_path / "kept", data) == hashlib.sha256(data).hexdigest() + ".png"
    assert images.kept(tmp_path / "kept" / name) == data
    Image.new("RGBA", (3, 2), (0, 0, 255, 0)).save(tmp_path / "clear.png")
    turned = Image.Exif()
    turned[images.ORIENTATION] = 6
    plain.save(tmp_path / "turned.jpg", exif=turned)
    for source, size, colour in (("clear.png", (3, 2), (255, 255, 255)), ("turned.jpg", (2, 3), None)):
        name = images.keep(tmp_path / "kept", (tmp_path / source).read_bytes())
        made = images.opened(images.kept(tmp_path / "kept" / name))
        assert (made.size, made.mode) == (size, "RGB") and colour in (None, made.getpixel((0, 0)))
    assert len([*(tmp_path / "kept").iterdir()]) == 3
    with pytest.raises(ValueError, match="cannot be decoded"):
        images.opened((tmp_path / "turned.jpg").read_bytes()[:-40])
    with pytest.raises(ValueError, match="no image of a known kind"):
        images.opened(b"GIF89a")
    with pytest.raises(ValueError, match="is an address"):
        images.data_of("https://example.com/a.png")
