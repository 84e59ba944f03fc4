"""Models, a stand-in for the server, and rollouts, with which engines are tested."""

from __future__ import annotations

import json
import stat
import sys
import threading
from pathlib import Path
from typing import Any

from commands import typed

from fsbarrier.engine.client import EngineClient
from fsbarrier.engine.engine import EngineInfo

NEVER = threading.Event()

TINY = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def write_model(
    folder: Path, *, tied: bool | None = False, width: int = 8, head: bool = True, **config: Any
) -> Path:
    """A model folder with weights of zeros; `tied` None: the configuration does not say."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {} if tied is None else {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps({**TINY, **said, **config}))
    names = ["model.embed_tokens.weight", *(["lm_head.weight"] if head else [])]
    size = 4 * width
    header = {
        name: {"dtype": "F32", "shape": [width], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(size * len(names))
    )
    return folder


def stand_in(folder: Path) -> str:
    """What stands for the Python that starts a server: its server is fake_vllm.py, with `folder`/fake for its files."""
    script = folder / "python"
    server = Path(__file__).parent / "fake_vllm.py"
    script.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {server} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (folder / "fake").mkdir()
    return str(script)


def behaviour(folder: Path, **mode: Any) -> str:
    """The value of FAKE_VLLM with which that server does what is asked of it."""
    return json.dumps({"dir": str(folder / "fake"), **mode})


def served(info: EngineInfo) -> str:
    """The folder that the stand-in serves now."""
    return str(EngineClient(info.url, info.api_key).model()["root"])


# --- for the real vLLM ---


def letters(*, ends: bool = True) -> Any:
    """A tokenizer whose tokens are letters. `ends`: whether there is one that ends an answer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *"abcdefghijklmnop:\n="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    end = {"eos_token": "<eos>"} if ends else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", **end)
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    return fast


def make_model(
    folder: Path,
    seed: int,
    *,
    tied: bool = False,
    architecture: str = "Qwen2",
    positions: int = 64,
    ends: bool = True,
) -> Path:
    """A tiny model with random weights; its vocabulary is the letters. `ends`: whether there is a token that ends an answer."""
    import torch
    import transformers

    fast = letters(ends=ends)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        eos_token_id=1 if ends else None,
        bos_token_id=None,
        pad_token_id=0,
    )
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


SAMPLES = 32


def roll_out(
    folder: Path, info: EngineInfo, version: int, prompts: list[Any]
) -> tuple[str, list[dict[str, Any]]]:
    """What it said, and the trajectories."""
    from test_rollout import make_spec, run

    from fsbarrier.trajectories import iter_trajectories

    folder.mkdir()
    engine = [{"url": info.url, "api_key": info.api_key, "model": info.model}]
    # So many that some answer ends by itself, whatever the server draws.
    sampling = {"samples": SAMPLES, "temperature": 0.7}
    spec = make_spec(folder, info.url, prompts, engine=engine, policy_version=version, sampling=sampling)
    done = run(spec)
    assert done.code == 0, done.stderr
    return done.stderr, list(iter_trajectories(folder / "trajectories" / "checkpoint"))


def largest_gap(model: Path, trajectories: list[dict[str, Any]], temperature: float) -> float:
    """Between the log-probabilities in the trajectories and those that transformers computes with these weights."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    gap = 0.0
    for item in trajectories:
        ids = torch.tensor(item["token_ids"].tolist())
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, :-1] / temperature
        own = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        sampled = torch.tensor(item["loss_mask"].tolist(), dtype=torch.bool)[1:]
        told = torch.tensor(item["logprobs"].tolist())[1:]
        gap = max(gap, float((own - told)[sampled].abs().max()))
    return gap


def refusal(folder: Path, words: list[str]) -> str:
    """The one line that ends a start with these words, in a folder that holds the model M."""
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    where = (f"--log-path={folder / 'run'}", f"--data-path={folder}", "--model=M", "rollout.max_tokens=16")
    told = typed("run", "--master", *where, *words, code=2).err
    assert told.count("\n") == 1, told
    assert not (folder / "run").exists()
    return told
