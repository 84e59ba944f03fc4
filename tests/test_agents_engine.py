"""The calculator agent with real vLLM and a tiny model that has learned to call it: what is recorded is what the engine computed."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_rollout import SAMPLES, make_spec, rolled_out, run

from fsbarrier.data.tasks import Task
from fsbarrier.engine.engine import Engine, EngineInfo
from fsbarrier.rewards.matching import numeric
from fsbarrier.rollouts.samples import SampledGroup, Sampling, SamplingServer
from fsbarrier.rollouts.sampling import Sampler
from fsbarrier.settings.resolve import resolve

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

CALCULATOR = Path(__file__).parent.parent / "phases" / "agents" / "calculator.py"
SPECIAL = ("<pad>", "<eos>", "<unk>", "<u>", "<a>", "<t>", "<bos>")
TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
LONGEST = 192


def tokenizer() -> Any:
    """Every printable letter is a token; roles, ends, and what is put before each text are special ones."""
    import tokenizers
    import transformers

    letters = {letter: index for index, letter in enumerate((*SPECIAL, *map(chr, range(32, 127))))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", letters["<bos>"])]
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<u>", "<a>", "<t>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def call(expression: str) -> str:
    asked = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>{asked}</tool_call>"


def make_model(folder: Path, steps: int = 90) -> None:
    """A model that mostly asks the calculator, and then says what it answered; seconds of training on one thread."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    letters, rng = tokenizer(), random.Random(0)
    config = transformers.Qwen2Config(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        bos_token_id=letters.bos_token_id,
        eos_token_id=letters.eos_token_id,
        pad_token_id=letters.pad_token_id,
    )
    model = transformers.Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        rows = []
        for _ in range(16):
            one, other = rng.randrange(5), rng.randrange(5)
            text = f"<bos><u>{one}+{other}=<eos><a>{call(f'{one}+{other}')}<eos><t>{one + other}<eos><a>{one + other}<eos>"
            rows.append(letters.encode(text, add_special_tokens=False))
        tokens = torch.tensor(rows)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    letters.save_pretrained(folder)


def test_what_is_recorded_is_what_the_engine_computed(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    chosen = {
        "engine.max_model_len": LONGEST,
        "rollout.max_tokens": 90,
        "rollout.agent": f"{CALCULATOR}:Calculator",
        "rollout.samples": SAMPLES,
        "reward.kind": "numeric",
    }
    engine = Engine(
        resolve([], chosen, cross_checks=False).engine,
        log_file=tmp_path / "vllm.log",
        work_dir=tmp_path / "work",
        threads=1,
    )
    try:
        info = engine.ensure(tmp_path / "model", 4, cancel=threading.Event())
        served = [{"url": info.url, "api_key": info.api_key, "model": info.model}]
        prompts = [[{"role": "user", "content": f"{a}+{b}="}] for a in range(4) for b in (1, 2)]
        answers = [{"prompt": prompt, "answer": str(eval(prompt[0]["content"][:-1]))} for prompt in prompts]
        spec = make_spec(tmp_path, info.url, prompts, engine=served, sampling={"max_tokens": 90}, **chosen)
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
        done = run(spec)
        asyncio.run(check_that_each_text_begins_once(info))
    finally:
        engine.stop()
    assert (done.code, done.stderr) == (0, "")
    groups = rolled_out(tmp_path)
    trajectories = [trajectory for group in groups.values() for trajectory in group]
    turns = Counter(trajectory["turns"] for trajectory in trajectories)
    assert turns[2] + turns[3] + turns[4] > len(trajectories) // 4, (
        f"the model hardly calls the tool: {turns}"
    )
    for index, group in groups.items():
        for trajectory in group:
            last = trajectory["messages"][-1]["content"]
            assert trajectory["reward"] == numeric(last, answers[index]["answer"]), (last, answers[index])
    assert all("segments" not in trajectory for trajectory in trajectories)
    assert_the_conversation_is_in_the_tokens(tmp_path / "model", trajectories)
    assert_logprobs(tmp_path / "model", trajectories)
    assert_it_can_be_trained_on(tmp_path)


async def check_that_each_text_begins_once(info: EngineInfo) -> None:
    """Texts with and without the token that the tokenizer puts before each text, some of which the server tokenizes itself."""
    server = SamplingServer(info.url, info.api_key, info.model, timeout_s=60.0, tries=2)
    texts = ("1+2=", "<bos>1+2=")
    groups: list[SampledGroup] = []
    async with Sampler(server, connections=4, on_tokens=lambda _: None) as sampler:
        await sampler.query_model()
        for text in texts:
            task = Task(0, "", text, None, {})
            await sampler.sample(
                {task.index: task},
                groups.append,
                Sampling(samples=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4),
            )
        plain, with_it = [await sampler.tokens(prompt=text) for text in texts]
    begin = tokenizer().bos_token_id
    for found in (plain, with_it, *(group.prompt_ids for group in groups)):
        assert found[0] == begin and list(found).count(begin) == 1 and len(found) == 5


def assert_the_conversation_is_in_the_tokens(folder: Path, trajectories: list[dict[str, Any]]) -> None:
    import transformers

    letters = transformers.AutoTokenizer.from_pretrained(folder)  # as the engine reads it: without spaces
    for trajectory in trajectories:
        ids, mask = list(trajectory["token_ids"]), list(trajectory["loss_mask"])
        assert (
            ids[0] == letters.bos_token_id
            and letters.bos_token_id not in ids[1 : trajectory["prompt_tokens"]]
        )
        assert len(ids) == len(mask) == len(trajectory["logprobs"])
        said = [message for message in trajectory["messages"] if message["role"] == "assistant"]
        assert sum(1 for i, m in enumerate(mask) if m and not mask[i - 1]) == trajectory["turns"] == len(said)
        for message in trajectory["messages"]:
            if message["role"] == "tool":
                shown = letters.encode(f"<t>{message['content']}<eos><a>", add_special_tokens=False)
                places = [i for i in range(len(ids)) if ids[i : i + len(shown)] == shown]
                assert any(not any(mask[i : i + len(shown)]) for i in places)


def assert_logprobs(folder: Path, trajectories: list[dict[str, Any]]) -> None:
    """The trainer's model gives each sampled token the probability that the engine gave, in exactly this context."""
    import torch
    import transformers

    model = transformers.Qwen2ForCausalLM.from_pretrained(folder)
    for trajectory in trajectories:
        ids = torch.tensor([list(trajectory["token_ids"])])
        mask = torch.tensor(list(trajectory["loss_mask"])).bool()[1:]
        with torch.no_grad():
            expected = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        recorded = torch.tensor(list(trajectory["logprobs"]))[1:]
        assert torch.allclose(expected[mask], recorded[mask], atol=2e-3)
        assert not recorded[~mask].any()


def assert_it_can_be_trained_on(folder: Path) -> None:
    from trainer_bench import Bench, settings

    (folder / "merged").hardlink_to(folder / "trajectories" / "checkpoint")
    bench = Bench(folder, settings())
    prepared = bench.prepare(policy_version=4, run_id="run")
    assert prepared["trajectories"] > 0
    result = bench.update("v5", version=5, trainer_state=None)
    assert result["optimizer_steps"] > 0 and result["logprob_gap_mean"] < 1e-3
