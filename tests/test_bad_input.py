"""Bad input: exit code 2, one clear line, no traceback, nothing created. Many kinds, the main ones as real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import typed
from fake_run import FakeRun
from test_renderer import STAND_IN, write_tokenizer
from waiting import DEADLINE_S

REPO = Path(__file__).resolve().parent.parent
TASK = {"prompt": "2+2=", "answer": "4"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with data, a model and whatever else the cases speak of; `run` in it does not exist yet."""
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(TASK) + "\n" for _ in range(3)))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "file").write_text("not a folder\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "reward.py").write_text(
        "def reward(task, text):\n    return 1.0\ndef judged(a, b, c, d, judge): pass\n"
        "def zero(new): return 0 * new.detach()\n"
    )
    (tmp_path / "broken.py").write_text("def reward(:\n")
    agents = "class Agent:\n async def run(self, task, client): pass\nclass Empty: pass\n"
    (tmp_path / "agent.py").write_text(
        agents + "class Plain:\n def run(self, task, client): pass\ndef f(): pass\n"
    )
    (tmp_path / "imports.py").write_text("import no_such_module\ndef reward(a, b, c, d): pass\n")
    (tmp_path / "exits.py").write_text("import os\ndef reward(a, b, c, d): pass\nos._exit(7)\n")
    shutil.copytree(data, tmp_path / "words")
    (tmp_path / "words" / "train.jsonl").write_text(json.dumps({**TASK, "answer": "four"}) + "\n")
    shutil.copytree(data, tmp_path / "places")
    (tmp_path / "places" / "train.jsonl").write_text(json.dumps({**TASK, "environment": "wbe"}) + "\n")
    chat = tmp_path / "chat"
    chat.mkdir()
    messages = {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"}
    for split in ("train", "test"):
        (chat / f"{split}.jsonl").write_text(json.dumps(TASK) + "\n" + json.dumps(messages) + "\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    shutil.copytree(model, tmp_path / "short")
    (tmp_path / "short" / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 64}')
    shutil.copytree(model, tmp_path / "granite")
    (tmp_path / "granite" / "config.json").write_text('{"model_type": "granite"}')
    shutil.copytree(model, tmp_path / "grades")
    (tmp_path / "grades" / "config.json").write_text(
        '{"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}'
    )
    for name, part in (("sees", "vision"), ("hears", "audio")):
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / "config.json").write_text(
            f'{{"model_type": "qwen3_5", "text_config": {{"model_type": "qwen3_5_text"}}, "{part}_config": {{"depth": 12}}}}'
        )
    for name, image in (("unseen", "absent.png"), ("garbled", "garbled.png")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "garbled.png").write_bytes(b"no image")
        shown = {"role": "user", "content": [{"type": "image", "image": image}]}
        for split in ("train", "test"):
            lines = (TASK, {"prompt": [shown], "answer": "4"})
            (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (tmp_path / "raises.py").write_text("raise RuntimeError('no')\n")
    (tmp_path / "nothing.py").write_text("x = 1\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    own = """
from dataclasses import replace
from fsbarrier.loader import load_module
toy = load_module("toy").PROGRAM
def mine(node):
    BODY
PROGRAM = replace(toy, rows=tuple(replace(row, each=mine) if row.name == "train_rollout" else row for row in toy.rows))
"""
    (tmp_path / "fails.py").write_text(own.replace("BODY", "raise KeyError('mine')"))
    (tmp_path / "returns_a_number.py").write_text(own.replace("BODY", "return 3"))
    (tmp_path / "returns_a_set.py").write_text(own.replace("BODY", "return {'ranks': {0, 1}}"))
    (tmp_path / "bad.toml").write_text("[rollout\n")
    (tmp_path / "typo.toml").write_text("[rollout]\ntemperatur = 1\n")
    return tmp_path


@dataclass
class Outcome:
    """What a command line came to."""

    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Outcome]


def clean_environ(place: Path) -> dict[str, str]:
    """Ours without what launchers leave there."""
    words = ("RANK", "SLURM", "NNODES", "OMPI", "WORLD_SIZE", "FSBARRIER", "JOB_COMPLETION")
    mine = {name: value for name, value in os.environ.items() if not any(word in name for word in words)}
    return {**mine, "PYTHONPATH": str(REPO), "FSBARRIER_LOG_PATH": str(place / "run")}


@pytest.fixture
def real(place: Path) -> Call:
    """Runs a command line as a process in `place`."""

    def call(words: Sequence[str], **environ: str) -> Outcome:
        env = {**clean_environ(place), **environ}
        command = [sys.executable, "-m", "fsbarrier", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=place, timeout=DEADLINE_S)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def quick(place: Path, monkeypatch: pytest.MonkeyPatch, warm_programs: None) -> Call:
    """Runs a command line in this process, in `place`."""

    def call(words: Sequence[str], **environ: str) -> Outcome:
        monkeypatch.chdir(place)
        for name in set(os.environ) - set(clean_environ(place)):
            monkeypatch.delenv(name)
        for name, value in {**clean_environ(place), **environ}.items():
            monkeypatch.setenv(name, value)
        shown = typed(*words, code=None)
        return Outcome(shown.code, shown.out, shown.err)

    return call


def listing(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def refused(
    call: Call, words: str | Sequence[str], *, place: Path, says: Sequence[str], **environ: str
) -> str:
    """Assert that a command line is refused as the contract wants it; gives the line."""
    before = listing(place)
    done = call(words.split() if isinstance(words, str) else words, **environ)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("fsbarrier: error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for part in says:
        assert part in lines[0], lines[0]
    assert listing(place) == before, "something was created"
    return lines[0]


PING = "run --program ping "
RL = "run --data-path data --model model "

CASES = {
    "unknown command": ("rnu", ["'rnu'", "did you mean run?"]),
    "unknown flag, nearly right": (
        PING + "--rank-weigths 1",
        ["--rank-weigths", "did you mean --rank-weights?"],
    ),
    "the same with its value": (PING + "--rank-weigths=1", ["did you mean --rank-weights?"]),
    "a number that is none, by its short flag": ("logs -n x", ["-n: must be a whole number, got 'x'"]),
    "a setting as a flag": (
        PING + "--rollout-temperature 0.5",
        ["unknown flag --rollout-temperature; settings are written rollout.temperature=VALUE"],
    ),
    "a setting by its last word": (
        PING + "--seed 3",
        ["unknown flag --seed; settings are written rollout.seed=VALUE"],
    ),
    "a setting by its initials": (
        PING + "--dzs=true",
        ["unknown flag --dzs; settings are written algorithm.drop_zero_signal=VALUE"],
    ),
    "like no flag": (PING + "--zz 3", ["unknown flag --zz"]),
    "a flag without its hyphens": ("run demo", ["'demo'; did you mean --demo?"]),
    "a number that JSON does not hold": (
        RL + "rollout.tasks=999999999999999999999999",
        ["rollout.tasks: must be at most 9,007,199,254,740,991"],
    ),
    "a run named twice": (
        "status mine --log-path its",
        ["mine and --log-path its: name the run directory once"],
    ),
    "a run as an argument": ("logs not-there", ["not-there: no run there"]),
    "a value for a flag without one": (PING + "--dry-run=yes", ["--dry-run: takes no value, got 'yes'"]),
    "no pool": ("submit", ["are required: POOL_DIR"]),
    "unknown flag, shortened": (PING + "--num 3", ["unknown flag --num"]),
    "flag without its value": (PING + "--num-nodes", ["--num-nodes"]),
    "a file of settings from a variable that is not set": (
        PING + "--config=",
        ["--config: must not be empty"],
    ),
    "a run from a variable that is not set": ("stop --log-path=", ["--log-path: must not be empty"]),
    "stray word": (PING + "mastr", ["'mastr'"]),
    "a setting without its value": (
        PING + "rollout.temperature",
        ["'rollout.temperature'; settings are written key=value"],
    ),
    "number of nodes is no number": (PING + "--num-nodes three", ["--num-nodes", "whole number", '"three"']),
    "a range that ends before it begins": (PING + "--num-nodes 8:2", ["--num-nodes 8:2", "such as 2:8"]),
    "a range that is none": (PING + "--num-nodes 2:", ["--num-nodes 2:", "such as 2:8"]),
    "the least nodes said twice": (
        PING + "--num-nodes 2:8 --min-nodes 1",
        ["--num-nodes 2:8", "drop --min-nodes"],
    ),
    "any rank and this rank": (PING + "--rank auto --master", ["--rank auto", "drop one"]),
    "a rank that is not auto": (PING + "--rank 2", ["--rank", "auto"]),
    "too few accelerators": (PING + "--expect-gpus 99", ["--expect-gpus 99: this node has"]),
    "zero nodes": (PING + "--master --num-nodes 0", ["--num-nodes", "≥ 1", "got 0"]),
    "too few weights": (
        PING + "--master --num-nodes 3 --rank-weights 1,1",
        ["--rank-weights 1,1", "--num-nodes 3"],
    ),
    "weights without a number of nodes": (
        PING + "--master --rank-weights 1,1",
        ["--rank-weights 1,1", "1 node"],
    ),
    "zero weight": (
        PING + "--master --num-nodes 2 --rank-weights 1,0",
        ["--rank-weights", "numbers > 0", "got [1, 0]"],
    ),
    "infinite weight": (PING + "--master --num-nodes 2 --rank-weights 1,inf", ["--rank-weights", "finite"]),
    "weight that is a word": (
        PING + "--master --num-nodes 2 --rank-weights 1,x",
        ["--rank-weights: must be a list of numbers > 0", '"1,x"'],
    ),
    "master and worker": (PING + "--master --worker 1", ["--master and --worker 1"]),
    "rank out of range": (PING + "--worker 3 --num-nodes 3", ["--worker 3", "ranks 0 to 2"]),
    "negative rank": (PING + "--worker -1", ["--worker", "0 or more", "-1"]),
    "node 0 as a worker": (PING + "--worker 0 --num-nodes 3", ["--worker 0", "--master"]),
    "rank that is a word": (PING + "--worker two", ["--worker", "whole number"]),
    "several nodes, no rank": (
        PING + "--num-nodes 3",
        ["the rank of this node is unknown, and the run has 3 nodes", "--master", "--worker"],
    ),
    "unknown setting": (
        PING + "rollout.temprature=1",
        ["rollout.temprature", "did you mean rollout.temperature?"],
    ),
    "setting of a wrong type": (PING + "rollout.temperature=hot", ["rollout.temperature", "number", '"hot"']),
    "setting out of its range": (PING + "eval.top_p=1.5", ["eval.top_p", "≤ 1", "1.5"]),
    "section as a setting": (PING + "rollout=1", ["rollout", "group of settings"]),
    "unknown rl phase": (PING + "--rl-phase train", ["--rl-phase", "one of rollout, update, both"]),
    "split without rollout phase": (
        PING + "--rollout-split eval-only",
        ["--rollout-split", "--rl-phase rollout"],
    ),
    "eval interval below zero": (PING + "--eval-interval -1", ["--eval-interval", "≥ 0"]),
    "nothing but an evaluation, and never one": (
        PING + "--rl-phase rollout --rollout-split eval-only --eval-interval 0",
        ["--eval-interval 0", "--rollout-split eval-only"],
    ),
    "more min nodes than nodes": (PING + "--min-nodes 2", ["--min-nodes 2", "num_nodes=1"]),
    "unknown failure policy": (
        PING + "--on-node-failure retry",
        ["--on-node-failure", "one of shrink, wait, abort"],
    ),
    "zero iterations": (PING + "--iterations 0", ["--iterations", "≥ 1"]),
    "few heartbeats before dead": (
        PING + "coordination.dead_s=5",
        ["coordination.beat_s", "coordination.dead_s"],
    ),
    "config is missing": (PING + "--config none.toml", ["--config none.toml", "No such file"]),
    "config is no TOML": (PING + "--config bad.toml", ["bad.toml", "line 1"]),
    "config with an unknown name": (
        PING + "--config typo.toml",
        ["typo.toml", "did you mean rollout.temperature?"],
    ),
    "resume of nothing": (PING + "--resume", ["--resume", "no run"]),
    "json without dry run": (PING + "--json", ["--json", "--dry-run"]),
    "log path is a file": (PING + "--log-path file", ["--log-path", "not a directory"]),
    "log path below a file": (PING + "--log-path file/run", ["--log-path", "not a directory"]),
    "log path cannot be made": (PING + "--log-path /proc/run", ["--log-path", "/proc"]),
    "unknown program": ("run --program toyy", ["--program toyy", "toy"]),
    "program file is missing": ("run --program ./mine.py", ["mine.py", "no such file"]),
    "program file is no Python": ("run --program ./broken.py", ["broken.py", "SyntaxError"]),
    "program file raises": (
        "run --program ./raises.py",
        ["raises.py", "RuntimeError: no (raises.py, line 1)"],
    ),
    "program file without a program": ("run --program ./nothing.py", ["nothing.py", "PROGRAM"]),
    "program file that ends the program": ("run --program ./leaves.py", ["leaves.py", "SystemExit: 3"]),
    "program whose function fails": (
        "run --program ./fails.py --dry-run",
        ["fails.py: phase train_rollout: KeyError: 'mine'"],
    ),
    "program whose function returns a number": (
        "run --program ./returns_a_number.py --dry-run",
        ["phase train_rollout: TypeError: mine returned int; a row returns a record, a mapping or None"],
    ),
    "program whose function returns what is no JSON": (
        "run --program ./returns_a_set.py --dry-run",
        ["phase train_rollout: TypeError: Object of type set is not JSON serializable"],
    ),
    "data without a model": ("run --data-path data", ["--data-path without --model"]),
    "another run's policy without data": (
        "run init_from=other@1",
        ["init_from=", "other@1 without --data-path"],
    ),
    "model without data": ("run --model model", ["--model without --data-path"]),
    "data path is missing": (
        "run --data-path nowhere --model model",
        ["--data-path", "nowhere", "no such folder"],
    ),
    "data path and model are missing": (
        "run --data-path nowhere --model none/such",
        ["--data-path", "nowhere", "no such folder"],
    ),
    "data path is a file": ("run --data-path file --model model", ["--data-path", "not a folder"]),
    "data path is empty": (
        "run --data-path empty --model model",
        ["empty", "no train.jsonl or train.parquet"],
    ),
    "model is missing": (
        "run --data-path data --model nowhere",
        ["--model nowhere", "no such folder", "config.json"],
    ),
    "model name that no cache has": (
        "run --data-path data --model org/name",
        ["--model org/name", "downloaded"],
    ),
    "model is a file": ("run --data-path data --model file", ["--model file", "is a file"]),
    "model folder is empty": (
        "run --data-path data --model empty",
        ["--model empty", "config.json: cannot be read"],
    ),
    "unknown reward": (RL + "reward.kind=exakt", ["reward.kind=exakt", "did you mean exact?"]),
    "reward file is missing": (RL + "reward.kind=none.py:reward", ["none.py", "no such file"]),
    "reward function is missing": (RL + "reward.kind=reward.py:rewrd", ["rewrd", "did you mean reward?"]),
    "trainer of a program that trains nothing": (
        PING + "--program toy trainer.command=true",
        ["trainer.command=true: program toy has no model; drop it"],
    ),
    "agent of a program without tasks": (
        PING + "rollout.agent=agent.py:Agent",
        ["rollout.agent=", "agent.py:Agent: program ping does not read tasks; drop it"],
    ),
    "agent is no file's class": (
        RL + "rollout.agent=mine",
        ["rollout.agent=mine: must be path/file.py:name"],
    ),
    "agent file is missing": (RL + "rollout.agent=none.py:A", ["none.py", "no such file"]),
    "agent is missing": (
        RL + "rollout.agent=agent.py:Agnt",
        ["agent.py does not define Agnt", "did you mean Agent?"],
    ),
    "agent has no run": (RL + "rollout.agent=agent.py:Empty", ["Empty: has no method run"]),
    "agent is not async": (RL + "rollout.agent=agent.py:Plain", ["Plain: its method run is not async"]),
    "agent is a function": (RL + "rollout.agent=agent.py:f", ["f is a function, not a class"]),
    "judge without an address": (
        RL + "reward.kind=judge",
        ["reward.kind=judge", "needs judge.model=engines.NAME, or judge.url and judge.model"],
    ),
    "reward with a wrong signature": (
        RL + "reward.kind=reward.py:reward",
        ["must accept a call reward(prompt, response, answer, metadata)", "too many positional arguments"],
    ),
    "reward whose file cannot be imported": (
        RL + "reward.kind=imports.py:reward",
        ["cannot load", "ModuleNotFoundError", "no_such_module", "(imports.py, line 1)"],
    ),
    "reward whose file ends the program": (RL + "reward.kind=exits.py:reward", ["exit code 7"]),
    "chat messages for a model without a template": (
        "run --data-path chat --model model",
        ["chat", "task 1", "has no chat template"],
    ),
    "answers longer than the model's positions": (
        "run --data-path data --model short rollout.max_tokens=64",
        ["rollout.max_tokens=64", "the model supports only 64 positions"],
    ),
    "a model that hears, of which the trainer would lose the ears": (
        RL.replace("--model model", "--model hears") + "--dry-run",
        ["hears is a qwen3_5 model with audio beside text and images", "or --rl-phase rollout"],
    ),
    "a plan for a model that hears": (
        "plan --model hears --accelerators 0",
        ["hears is a qwen3_5 model with audio beside text and images"],
    ),
    "images for a model that takes none": (
        "run --data-path unseen --model model",
        ["unseen/train.jsonl, line 2: has an image, but the model", "takes none"],
    ),
    "images for a reward model": (
        "run --data-path unseen --model sees --rl-phase rollout reward.kind=engines.rm engines.rm.model=grades",
        ["unseen/train.jsonl, line 2: has an image, and reward.kind=engines.rm gets tokens without images"],
    ),
    "images for a teacher": (
        "run --data-path unseen --model sees --rl-phase rollout algorithm.loss=distil "
        "engines.teacher.model=model engines.teacher.max_model_len=64 engine.max_model_len=63 rollout.max_tokens=32",
        ["unseen/train.jsonl, line 2: has an image, and the teacher of algorithm.loss=distil gets tokens"],
    ),
    "a page of an environment without its slash": (
        RL
        + "rollout.agent=agent.py:Agent environments.mycommand.command=env{port} environments.mycommand.health=up",
        ["environments.mycommand.health=up", "must begin with /"],
    ),
    "an environment that is not there": (
        [
            *["run", "--data-path", "places", "--model", "model", "rollout.agent=agent.py:Agent"],
            "environments.web.command=env {port}",
        ],
        ["places/train.jsonl, line 1: there is no environment wbe; there is web"],
    ),
    "an image that is not there": (
        "run --data-path unseen --model sees --rl-phase rollout",
        ["unseen/train.jsonl, line 2: image absent.png: ", "No such file"],
    ),
    "an image that is none": (
        "run --data-path garbled --model sees --rl-phase rollout",
        ["garbled/train.jsonl, line 2: image garbled.png: is no image of a known kind (PNG, JPEG, WEBP)"],
    ),
    "a model that sees, and a critic": (
        RL.replace("--model model", "--model sees") + "algorithm.advantage=gae",
        [
            "algorithm.advantage=gae: ",
            "sees is a qwen3_5 model, which takes images; transformers has no critic of it",
        ],
    ),
    "a critic that transformers cannot make": (
        RL.replace("--model model", "--model granite") + "algorithm.advantage=gae",
        ["granite is a granite model, of which transformers has no critic"],
    ),
    "an attention that is not installed": (
        RL + "trainer.attention=flash_attention_2",
        ["trainer.attention=flash_attention_2: needs the Python package flash_attn"],
    ),
    "a critic that is not there": (
        RL + "algorithm.advantage=gae critic.model=nowhere",
        ["critic.model=nowhere: no such folder"],
    ),
    "a model that sees, and DeepSpeed": (
        RL.replace("--model model", "--model sees") + "trainer.backend=deepspeed",
        ["sees is a qwen3_5 model, which takes images and is only trained with trainer.backend=torch"],
    ),
    "function without its judge": (
        RL + "reward.kind=reward.py:judged",
        ["needs judge.model=engines.NAME, or judge.url and judge.model"],
    ),
    "judge's address": (
        RL + "reward.kind=judge judge.model=m judge.url=here",
        ["judge.url=here: must be a URL such as https://host/v1"],
    ),
    "judge's key": (
        RL + "reward.kind=judge judge.model=m judge.url=http://h/v1 judge.api_key_env=NOT_SET",
        ["judge.api_key_env=NOT_SET: this variable is not set on this node"],
    ),
    "a stage of ZeRO for another backend": (
        RL + "trainer.zero_stage=1",
        ["trainer.zero_stage=1: requires trainer.backend=deepspeed", "trainer.backend=torch"],
    ),
    "weights offloaded that are not sharded": (
        RL + "trainer.backend=deepspeed trainer.zero_stage=2 trainer.offload=all",
        ["trainer.offload=all: requires trainer.zero_stage=3"],
    ),
    "adapters with DeepSpeed": (
        RL + "trainer.backend=deepspeed lora.rank=4",
        ["lora.rank=4: not supported with"],
    ),
    "adapters of a rank that vLLM cannot serve": (
        RL + "lora.serve=adapter lora.rank=513",
        [
            "lora.rank=513: with lora.serve=adapter vLLM serves adapters of rank 512 at most; use lora.serve=merged"
        ],
    ),
    "adapters of the head, which vLLM ignores": (
        RL + "lora.serve=adapter lora.rank=4 lora.targets=q_proj,lm_head",
        ["lora.targets=q_proj,lm_head: with lora.serve=adapter vLLM ignores adapters of the output head"],
    ),
    "adapters on engines that serve merged weights only": (
        RL + "lora.serve=adapter lora.rank=2 engine.nodes=2 engine.tensor_parallel_size=2 --num-nodes 2",
        ["engine.nodes=2: an engine over several nodes serves merged weights only"],
    ),
    "adapters on a server of the user's own": (
        RL + "lora.serve=adapter lora.rank=2 --debug-mode",
        ["lora.serve=adapter: the server is not this run's; drop --debug-mode, or use lora.serve=merged"],
    ),
    "adapters of a trainer of the user's own": (
        RL + "lora.serve=adapter lora.rank=2 trainer.command=true",
        ["lora.serve=adapter: trainer.command=true publishes no adapters that this run knows"],
    ),
    "adapters that running requests name, in flight": (
        RL + "lora.serve=adapter lora.rank=2 rollout.in_flight=true rollout.ahead=1 --num-nodes 2"
        " placement.rollout=node:1 placement.update=node:0",
        ["rollout.in_flight=true: with lora.serve=adapter running requests keep the adapters that they name"],
    ),
    "adapters beside a model that sees": (
        RL.replace("--model model", "--model sees") + "lora.rank=2 lora.serve=adapter",
        ["sees is a qwen3_5 model, which takes images; engines serve it with merged adapters"],
    ),
    "copies of a node with DeepSpeed": (
        RL + "trainer.backend=deepspeed trainer.shard=node",
        ["trainer.shard=node: not supported with", "trainer.zero_stage"],
    ),
    "a set without a file": (RL + "eval.sets.aime.samples=2", ["data: has no aime.jsonl or aime.parquet"]),
    "a set whose file is not there": (
        RL + "eval.sets.aime.file=no.jsonl",
        ["eval.sets.aime.file=no.jsonl:", "data/no.jsonl is not a file"],
    ),
    "a set of training tasks without a file": (
        RL + "train.sets.a.weight=2",
        ["data: has no a.jsonl or a.parquet"],
    ),
    "a set of training tasks whose file is not there": (
        RL + "train.sets.a.file=no.jsonl",
        ["train.sets.a.file=no.jsonl:", "data/no.jsonl is not a file"],
    ),
    "a set without tasks": (
        RL + "train.sets.a.file=train.jsonl train.sets.a.where=level=3:",
        ["train.sets.a.where=level=3:", "fits no task of", "train.jsonl"],
    ),
    "two sets of the same tasks": (
        RL + "train.sets.a.file=train.jsonl train.sets.b.file=train.jsonl",
        ["train.jsonl, task 0: belongs to both train.sets.a and train.sets.b"],
    ),
    "a set that the model cannot read": (
        RL.replace("--model model", "--model short") + "eval.max_tokens=64 rollout.max_tokens=8",
        ["eval.max_tokens=64: leaves no room", "64 positions"],
    ),
    "a set that the built-in task has not": (
        "run eval.sets.aime.samples=2",
        ["has no aime.jsonl or aime.parquet"],
    ),
    "the second reward cannot use an answer": (
        "run --data-path words --model model reward.kind=exact,numeric",
        ["words/train.jsonl, line 1: reward.kind=numeric needs an answer with a number, not 'four'"],
    ),
    "loss file is missing": (RL + "algorithm.loss=none.py:loss", ["algorithm.loss=", "no such file"]),
    "loss without a gradient": (
        RL + "algorithm.loss=reward.py:zero",
        ["reward.py:zero: its loss has no gradient"],
    ),
    "reward file is no Python": (RL + "reward.kind=broken.py:reward", ["broken.py, line 1"]),
    "engine address is none": (RL + "engine.url=ftp://x", ["engine.url=ftp://x", "http://"]),
    "engine key is not set": (
        RL + "engine.api_key_env=NO_SUCH_KEY",
        ["engine.api_key_env=NO_SUCH_KEY", "not set"],
    ),
    "demo with a rank": ("run --demo --worker 1", ["--demo", "--worker"]),
    "demo with a model": ("run --demo --model model", ["--model", "demo"]),
    "launch without a place": ("launch", ["launch", "`local`"]),
    "launch elsewhere": ("launch mars --nodes 2", ["launch mars", "`local`"]),
    "launch with a bad setting": ("launch local --nodes 2 --program ping toy.tasks=x", ["toy.tasks", '"x"']),
    "launch with a bad number": ("launch local --nodes x --program ping", ["--num-nodes", '"x"']),
    "launch with an ssh that is not there": (
        "launch ssh --hosts a --program ping --ssh none-such",
        ["--ssh none-such: no such program on this machine"],
    ),
    "pool where no files can be": ("daemon /proc/pool", ["daemon /proc/pool: /proc is a kernel filesystem"]),
    "pool below a file": ("daemon file/pool", ["daemon", "file is not a directory"]),
    "plan without memory": (
        "plan --model model --accelerators 1 --accelerator-memory-gb nan",
        ["--accelerator-memory-gb nan: must be greater than 0"],
    ),
    "plan of a model that is not described": (
        "plan --model model --accelerators 1 --accelerator-memory-gb 1",
        ["model/config.json lacks hidden_size"],
    ),
    "plan of a damaged description": ("plan --model damaged", ["damaged/config.json: is not JSON"]),
    "stop of no run": ("stop", ["--log-path", "no run"]),
    "logs of no run": ("logs --log-path empty", ["--log-path empty", "no run"]),
    "recovery of no number": ("recover --iteration x", ["--iteration: must be a whole number, got 'x'"]),
    "merge of no number": ("aggregate --iteration x", ["--iteration: must be a whole number, got 'x'"]),
    "status of a file": ("status --log-path file", ["--log-path file: no run there"]),
    "logs of a negative node": ("logs --node -1", ["--node", "0 or more"]),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_refused(place: Path, quick: Call, case: str) -> None:
    words, says = CASES[case]
    refused(quick, words, place=place, says=says)


def test_an_empty_word_stands_for_no_default(place: Path, quick: Call) -> None:
    refused(quick, ["status", "--log-path", ""], place=place, says=["--log-path: must not be empty"])
    refused(quick, ["run", "--program", "ping", ""], place=place, says=["an argument: must not be empty"])


@pytest.mark.parametrize("case", list(CASES)[::13])
def test_wrong_input_is_refused_by_the_real_command(place: Path, real: Call, case: str) -> None:
    words, says = CASES[case]
    refused(real, words, place=place, says=says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"answer": "4"}', "prompt"),
        ('{"prompt": "2+2="}', "answer"),
        ('{"prompt": 4, "answer": "4"}', "prompt"),
        ('{"prompt": [{"role": "user"}], "answer": "4"}', "content"),
        ("\udc80", "line 2"),
        ('{"prompt": " \\n", "answer": "4"}', "prompt is blank"),
        ('{"prompt": [{"role": "user", "content": " "}], "answer": "4"}', "all messages are blank"),
        ('{"prompt": "2+2=", "answer": NaN}', "NaN is no JSON value"),
    ],
)
def test_a_malformed_task_is_named_by_file_and_line(place: Path, quick: Call, line: str, says: str) -> None:
    for split in ("train", "test"):
        good = (place / "data" / f"{split}.jsonl").read_text()
        bad = json.dumps(TASK) + "\n" + line + "\n" + json.dumps(TASK) + "\n"
        (place / "data" / f"{split}.jsonl").write_text(bad, encoding="utf-8", errors="surrogateescape")
        refused(quick, RL, place=place, says=[f"{split}.jsonl, line 2", says])
        (place / "data" / f"{split}.jsonl").write_text(good)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("ab" * 40, 80), ([{"role": "user", "content": "ab" * 31}, {"role": "user", "content": "a="}], 64)],
)
def test_a_prompt_that_leaves_no_room_for_an_answer(
    place: Path, quick: Call, prompt: object, tokens: int
) -> None:
    """Text, and messages as the template renders them."""
    model = place / "small"
    shutil.copytree(REPO / "fsbarrier" / "data" / "demo" / "model", model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    good = {"prompt": "a" * 63, "answer": "a"}
    lines = (json.dumps(good), json.dumps({"prompt": prompt, "answer": "b"}))
    (place / "data" / "test.jsonl").write_text("\n".join(lines) + "\n")
    words = [
        "run",
        "--data-path",
        "data",
        "--model",
        str(model),
        "engine.max_model_len=64",
        "rollout.max_tokens=8",
    ]
    refused(
        quick,
        words,
        place=place,
        says=[f"test.jsonl, line 2: the prompt has {tokens} tokens", "engine.max_model_len=64"],
    )


TEMPLATE = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role", "says"),
    [
        (None, "user", "has no chat template"),
        ("{% for m in messages %}{{ m.content }", "user", "the chat template of"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "user",
            "cannot render the prompt: roles must alternate",
        ),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "user",
            "cannot render the prompt: it takes more than 3 s",
        ),
        ("{{ 'x' * 10**11 }}", "user", "cannot render the prompt: it takes more than 4 GiB of memory"),
        (TEMPLATE, "usr", "leaves out the message of role 'usr'"),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
            "usr",
            "does not know the role 'usr'",
        ),
    ],
)
def test_a_chat_template_that_cannot_render_the_tasks(
    place: Path, quick: Call, template: str | None, role: str, says: str
) -> None:
    for split in ("train", "test"):
        messages = {"prompt": [{"role": role, "content": "2+2="}], "answer": "4"}
        (place / "data" / f"{split}.jsonl").write_text(json.dumps(messages) + "\n")
    if template is not None:
        (place / "model" / "chat_template.jinja").write_text(template)
    refused(quick, RL, place=place, says=[says, str(place / "model")])
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE.replace("user", role))
    assert quick([*RL.split(), "--dry-run"]).returncode == 0


def test_a_run_that_never_evaluates_needs_no_test_tasks(place: Path, quick: Call) -> None:
    (place / "data" / "test.jsonl").unlink()
    refused(quick, RL, place=place, says=["test.jsonl"])
    done = quick([*RL.split(), "--eval-interval", "0", "--dry-run"])
    assert done.returncode == 0, done.stderr
    FakeRun(place / "run", nodes=2)
    refused(quick, "run --worker 1", place=place, says=["was created without train tasks"])


def test_the_chat_template_is_tried_with_each_kind_of_prompt(place: Path, quick: Call) -> None:
    prompts = [[{"role": role, "content": f"I am {role}"}] for role in ("user", "system")]
    tasks = "".join(json.dumps({"prompt": prompt, "answer": "4"}) + "\n" for prompt in prompts)
    (place / "data" / "train.jsonl").write_text(tasks)
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE)
    refused(quick, RL, place=place, says=["train.jsonl, task 1", "leaves out the message of role 'system'"])


CALLS = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": [{"role": "assistant", "content": None, "tool_calls": CALLS}]},
            "leaves out the field tool_calls of message 1",
        ),
        (
            {
                "prompt": [
                    {"role": "user", "content": "4"},
                    {"role": "assistant", "content": "8", "reasoning_content": "so"},
                ]
            },
            "leaves out the field reasoning_content of message 2",
        ),
        (
            {"prompt": [{"role": "user", "content": "4"}], "tools": [{"name": "add", "parameters": {}}]},
            "leaves out the field tools",
        ),
        (
            {"prompt": [{"role": "user", "content": "4", "name": "Ada"}]},
            "leaves out the field name of message 1",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "4"}],
                "chat_template_kwargs": {"enable_thinking": False},
            },
            "leaves out chat_template_kwargs.enable_thinking",
        ),
        (
            {"prompt": [{"role": "user", "content": "4", "weight": 2}]},
            "prompt: message 1 has the field 'weight', which no chat template is given",
        ),
        (
            {"prompt": [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "4"}]}]},
            "tool_calls: call 1: arguments must be a JSON object",
        ),
        (
            {"prompt": [{"role": "user", "content": "4"}], "chat_template_kwargs": {"mode": "\ud800"}},
            "contains an unpaired surrogate",
        ),
        ({"prompt": "2+2=", "tools": [{"name": "add"}]}, "has tools, and its prompt is text"),
        (
            {"prompt": [{"role": "user", "content": "4"}], "tools": [{}]},
            "tools: tool 1 needs function.name (text)",
        ),
        ({"prompt": [{"role": "user", "content": "4"}], "tools": 5}, "tools must be a list of tools, got 5"),
    ],
)
def test_a_part_of_a_task_that_the_template_would_drop(
    place: Path, quick: Call, row: dict[str, Any], says: str
) -> None:
    fine = {"prompt": [{"role": "user", "content": "3+3="}], "answer": "6"}
    (place / "data" / "train.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in (fine, {"answer": "4", **row}))
    )
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE)
    refused(quick, RL, place=place, says=["train.jsonl, line 2: ", says])
    (place / "model" / "chat_template.jinja").write_text(TELLING)
    words = [*RL.split(), "--eval-interval", "0", "--dry-run"]
    assert quick(words).returncode == (0 if "leaves out" in says else 2)


#: a template that renders all that a message may have
TELLING = (
    "{{ tools }}{{ enable_thinking }}{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.reasoning }}{{ m.content }}"
    "{% for call in m.tool_calls %}{% for name, value in call.function.arguments.items() %}{{ value }}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_thoughts_are_switched_by_the_template_or_not_at_all(place: Path, quick: Call, thinking: str) -> None:
    task = {"prompt": [{"role": "user", "content": "3+3="}], "answer": "6"}
    (place / "data" / "train.jsonl").write_text(json.dumps(task) + "\n")
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE)
    word = f"rollout.thinking={thinking}"
    refused(
        quick,
        [*RL.split(), word],
        place=place,
        says=[word, "has no argument for it (enable_thinking, thinking)"],
    )
    (place / "model" / "chat_template.jinja").write_text(TELLING)
    assert quick([*RL.split(), "--eval-interval", "0", "--dry-run", word]).returncode == 0


def test_a_dry_run_says_which_parser_reads_calls_of_tools(place: Path, quick: Call) -> None:
    agent = Path(__file__).parent.parent / "phases" / "agents" / "calculator.py"
    words = [*RL.split(), "--dry-run", "--eval-interval", "0", f"rollout.agent={agent}:Calculator"]
    for template, more, parser, why in (
        (TEMPLATE, (), "hermes", "the chat template names none"),
        (TEMPLATE + "{# <tool_call><function= #}", (), "qwen3_coder", "by the chat template"),
        (TEMPLATE, ("rollout.tool_parser=glm45",), "glm45", "rollout.tool_parser"),
    ):
        (place / "model" / "chat_template.jinja").write_text(template)
        shown = quick([*words, *more]).stdout
        assert f"calls of tools: read by vLLM's parser {parser} ({why})" in shown
        assert f"--enable-auto-tool-choice --tool-call-parser {parser} " in shown
    for template, more, how in (
        (TEMPLATE, (), "by their marks <think> and </think> (the chat template names none)"),
        (
            TEMPLATE + "{# [THINK][/THINK] #}",
            (),
            "by their marks [THINK] and [/THINK] (by the chat template)",
        ),
        (
            TEMPLATE,
            ("rollout.reasoning_parser=seed_oss",),
            "by their marks <seed:think> and </seed:think> (rollout.reasoning_parser)",
        ),
        (
            TEMPLATE,
            ("rollout.reasoning_parser=inkling",),
            "by vLLM's parser inkling (rollout.reasoning_parser)",
        ),
    ):
        (place / "model" / "chat_template.jinja").write_text(template)
        shown = quick([*words, *more]).stdout
        assert f"thoughts: read {how}" in shown and ("--reasoning-parser inkling" in shown) == (
            "inkling" in how
        )


@pytest.mark.parametrize("name", ["auto", "template"])
def test_what_appends_an_agents_turns_is_said(place: Path, quick: Call, name: str) -> None:
    words = [*RL.split(), "--dry-run", "--eval-interval", "0", f"rollout.renderer={name}"]
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE)
    says = "turns: appended as the chat template writes them"
    assert says not in quick(words).stdout
    agent = Path(__file__).parent.parent / "phases" / "agents" / "calculator.py"
    assert says in quick([*words, f"rollout.agent={agent}:Calculator"]).stdout


@pytest.mark.parametrize(
    ("words", "row", "says"),
    [
        (
            "rollout.renderer=qwen9",
            {},
            "cannot use it for {model}: Unknown renderer 'qwen9'. Available: letters",
        ),
        ("rollout.renderer=default", {}, "appends no turns; give rollout.renderer=template"),
        (
            "rollout.renderer=letters rollout.chat_template_kwargs=shade=3",
            {},
            "Unsupported chat_template_kwargs: ['shade']",
        ),
        (
            "rollout.renderer=letters",
            {"chat_template_kwargs": {"style": 1}},
            "train.jsonl, line 1: chat_template_kwargs: rollout.renderer=letters gets the same arguments for all tasks",
        ),
    ],
)
def test_a_renderer_that_does_not_fit_is_refused_before_the_start(
    place: Path, quick: Call, monkeypatch: pytest.MonkeyPatch, words: str, row: dict[str, Any], says: str
) -> None:
    write_tokenizer(place / "model")
    (place / "model" / "chat_template.jinja").write_text(TELLING + "{{ style }}{{ shade }}")
    task = {"prompt": [{"role": "user", "content": "3+3="}], "answer": "6"}
    (place / "data" / "train.jsonl").write_text(json.dumps({**task, **row}) + "\n")
    (place / "packages").mkdir()
    (place / "packages" / "renderers.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(place / "packages")
    path = {"PYTHONPATH": str(place / "packages")}
    says = says.format(model=place / "model")
    refused(quick, [*RL.split(), *words.split(), "--eval-interval", "0"], place=place, says=[says], **path)
    if row:
        (place / "data" / "train.jsonl").write_text(json.dumps(task) + "\n")
        shown = quick([*RL.split(), *words.split(), "--eval-interval", "0", "--dry-run"], **path)
        assert "answers: read by the renderer letters (rollout.renderer)" in shown.stdout, shown.stderr


@pytest.mark.skipif(importlib.util.find_spec("renderers") is not None, reason="the package is here")
def test_a_renderer_without_its_package_is_refused(place: Path, quick: Call) -> None:
    told = "rollout.renderer=qwen3: needs the Python package renderers, which is not installed in"
    how = f"; type {sys.executable} -m pip install renderers, on every node"
    refused(quick, [*RL.split(), "rollout.renderer=qwen3"], place=place, says=[told, how])


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("rollout.tool_parser=glm45", "and there is none"),
        ("rollout.reasoning_parser=qwen4", "vLLM has no such parser; did you mean qwen3?"),
        (
            "rollout.reasoning_parser=inkling rollout.max_thinking_tokens=2",
            "the marks of rollout.reasoning_parser=inkling are not known",
        ),
        ("rollout.thinking=off", "all tasks are texts, to which no chat template is applied"),
        ("sft.split_turns=true", "has no effect with program=rl"),
    ],
)
def test_what_only_agents_and_fine_tuning_read(place: Path, quick: Call, word: str, says: str) -> None:
    refused(quick, [*RL.split(), *word.split()], place=place, says=[word.split()[-1], says])


def test_a_model_in_a_cache_is_its_main_revision(place: Path, quick: Call) -> None:
    cached = place / "hub" / "models--me--tiny"
    for name in ("aaa", "bbb", "ccc"):
        shutil.copytree(place / "model", cached / "snapshots" / name)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("bbb\n")
    words = ["run", "--data-path", "data", "--model", "me/tiny", "--dry-run", "--json"]
    for name, value in (("HF_HUB_CACHE", "hub"), ("HF_HOME", ".")):
        shown = quick(words, **{name: str(place / value)})
        assert json.loads(shown.stdout)["settings"]["model"] == str(cached / "snapshots" / "bbb"), (
            shown.stderr
        )


def test_a_model_in_a_cache_that_was_pinned_by_commit(place: Path, quick: Call) -> None:
    commits = place / "hub" / "models--me--pinned" / "snapshots"
    shutil.copytree(place / "model", commits / "abc")
    words = ["run", "--data-path", "data", "--model", "me/pinned", "--dry-run", "--json"]
    shown = quick(words, HF_HUB_CACHE=str(place / "hub"))
    assert json.loads(shown.stdout)["settings"]["model"] == str(commits / "abc"), shown.stderr
    shutil.copytree(place / "model", commits / "def")
    told = quick(words, HF_HUB_CACHE=str(place / "hub"))
    assert told.returncode == 2 and "no refs/main and several commits (abc, def)" in told.stderr


def test_a_model_that_transformers_cannot_make_is_refused_before_the_start(place: Path, quick: Call) -> None:
    config = place / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "mystery"}))
    told = quick([*RL.split(), "--dry-run"])
    assert told.returncode == 2 and "has no language model of the kind mystery" in told.stderr, told.stderr


def test_a_filesystem_that_is_almost_full(place: Path, quick: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.statvfs(place)
    almost = [*there[:2], 10**7, 9_000_000 // there.f_frsize, 9_000_000 // there.f_frsize, *there[5:10]]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(almost))
    words = PING + "--iterations 1"
    refused(quick, words, place=place, says=["--log-path", "9 MB free, and at least 17 MB are needed"])


def test_a_range_of_nodes_is_the_fewest_and_the_most(quick: Call) -> None:
    shown = quick([*PING.split(), "--num-nodes", "2:4", "--dry-run", "--json"])
    settings = json.loads(shown.stdout)["settings"]
    assert (settings["num_nodes"], settings["min_nodes"], settings["rank_weights"]) == (4, 2, [1.0] * 4)
    assert settings["coordination"]["last_call_s"] == 10, "it does not wait for the most"
    # A value of one's own wins over the one that the range stands for, in whichever order they are typed.
    for words in (
        ["--num-nodes", "2:4", "coordination.last_call_s=3"],
        ["coordination.last_call_s=3", "--num-nodes", "2:4"],
    ):
        own = json.loads(quick([*PING.split(), *words, "--dry-run", "--json"]).stdout)["settings"]
        assert (own["num_nodes"], own["min_nodes"], own["coordination"]["last_call_s"]) == (4, 2, 3)
    said = quick([*PING.split(), "--num-nodes", "2:4", "--min-nodes", "3", "--dry-run"])
    assert (
        said.returncode == 2
        and "--num-nodes 2:4: already sets the minimum number of nodes; drop --min-nodes" in said.stderr
    )


@pytest.mark.parametrize(
    ("remove", "says"),
    [
        ("config.json", "config.json: cannot be read: No such file"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_model_folder_lacks_something(place: Path, quick: Call, remove: str, says: str) -> None:
    (place / "model" / remove).unlink()
    refused(quick, RL, place=place, says=["--model model", says])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("nowhere.py {out}", "program 'nowhere.py' not found on this node"),
        ("sh {batchh} {out}", "unknown placeholder {batchh}; did you mean batch?"),
        ("sh {batch}", "needs {out}"),
        ('sh "{out}', "No closing quotation"),
    ],
)
def test_a_wrong_trainer_command_is_refused_by_name(
    place: Path, quick: Call, command: str, says: str
) -> None:
    refused(quick, [*RL.split(), f"trainer.command={command}"], place=place, says=["trainer.command", says])


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, ["JOB_COMPLETION_INDEX=0", "give --num-nodes"]),
        ({"NODE_RANK": "1"}, ["NODE_RANK=1", "give --num-nodes", "or --worker 1"]),
        ({"RANK": "0"}, ["RANK=0", "give --num-nodes"]),
        (
            {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"},
            ["WORLD_SIZE=16", "RANK=0 counts processes here", "NODE_RANK"],
        ),
        ({"SLURM_NNODES": "4"}, ["SLURM_NNODES=4", "SLURM_NODEID is not set", "--master"]),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            ["OMPI_COMM_WORLD_SIZE=8", "OMPI_COMM_WORLD_RANK=3 counts processes"],
        ),
    ],
)
def test_one_of_several_nodes_never_becomes_a_run_of_one(
    place: Path, quick: Call, environ: dict[str, str], says: list[str]
) -> None:
    refused(quick, PING, place=place, says=says, **environ)


def test_a_worker_that_contradicts_the_record(place: Path, quick: Call) -> None:
    FakeRun(place / "run", nodes=1, program="ping", extra={"rollout.seed": 5})
    words = "run --master rollout.seed=7"
    said = refused(quick, words, place=place, says=["7", "(5, from run/run.json made by "])
    assert said.endswith("use another --log-path")
    words = "run --master --program toy"
    refused(quick, words, place=place, says=["--program toy contradicts", "(ping, from run/run.json"])
    refused(quick, "logs --node 7", place=place, says=["--node 7", "no matching logs"])


def test_a_record_that_was_edited(place: Path, quick: Call) -> None:
    record = FakeRun(place / "run", nodes=1, program="ping").paths.record
    record.write_text(record.read_text().replace('"num_nodes": 1', '"num_nodes": 2'))
    for words in ("run --worker 1", "logs", "stop"):
        refused(quick, words, place=place, says=["run/run.json", "edited"])


@pytest.mark.parametrize(
    "name",
    [
        "model.pt",
        "checkpoints/mine/weights",
        "train_trajectories/train_trajectories.pt.iteration1",
        "events/a",
        "thesis.tex",
    ],
)
def test_a_new_run_writes_over_nothing_of_somebody_else(place: Path, quick: Call, name: str) -> None:
    """Other programs have files of these names as well."""
    path = place / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    for words in (PING + "--iterations 1", PING + "--dry-run"):
        refused(
            quick,
            words,
            place=place,
            says=[f"{place / 'run'}: contains {name.split('/')[0]}", "run.json"],
        )


def test_a_new_run_takes_folders_that_are_empty(place: Path, quick: Call) -> None:
    """A disk may be mounted there for it."""
    (place / "run" / "checkpoints" / "lost+found").mkdir(parents=True)
    (place / "run" / "logs").mkdir()
    (place / "run" / "logs" / "launcher.log").write_text("started")
    done = quick((PING + "--iterations 1").split())
    assert done.returncode == 0, done.stderr


def test_control_characters_from_input_do_not_reach_the_terminal(place: Path, quick: Call) -> None:
    line = refused(
        quick, [*PING.split(), "rollout.temperature=\x1b[31m\nhot"], place=place, says=["rollout.temperature"]
    )
    assert "\x1b" not in line


@pytest.mark.parametrize(
    "words", ["--master --program ping --log-path", "--master --data-path", "--worker 1 --log-path"]
)
def test_a_path_that_is_not_utf_8(place: Path, quick: Call, words: str) -> None:
    refused(quick, ["run", *words.split(), "bad\udcff"], place=place, says=["bad\\xff' is not UTF-8"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_log_path_that_is_not_writable(place: Path, quick: Call) -> None:
    (place / "empty").chmod(0o500)
    refused(quick, PING + "--log-path empty/run", place=place, says=["--log-path", "not writable"])
