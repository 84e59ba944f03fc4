"""Complete runs of the default program in about a second: the real commands, daemon, rollouts, merges and updates of a tiny model.

Two things are not real. The server is fake_vllm.py. And no program starts a new Python: one process has imported what the programs
import, each daemon is a fork of it, and each program that a daemon starts is a fork of the daemon. It is not the process of the tests,
because PyTorch does not compute in a fork of a process in which it has computed gradients.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import setting_reads
from forks import CASE_S, command, warm_server
from forks import be_program as be_program
from forks import in_a_fork as in_a_fork
from forks import wait_for as wait_for

from fsbarrier.rundir import logs
from fsbarrier.rundir.journal import read_events

VOCABULARY = 128  # the letters, which are their own token ids
#: what makes each iteration small
SMALL = (
    *("rollout.tasks=2", "rollout.samples=2", "rollout.max_tokens=16", "eval.tasks=2"),
    *("engine.max_model_len=64", "trainer.minibatch=2", "trainer.epochs=1", "coordination.beat_s=0.1"),
)


# --- what a run needs -----------------------------------------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    """A model whose output head is zero: each token has the same probability, as the stand-in for the server says."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_tasks(folder: Path, count: int = 4) -> Path:
    """Tasks that are half solved, so that every group has a signal."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [
        {"prompt": f"{'21' * (n + 1)}!mixed=", "answer": "1" * (n + 1) + "2" * (n + 1), "level": n}
        for n in range(count)
    ]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return folder


class Bench:
    """A model and tasks in a folder, and the runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warm = ProcessPoolExecutor(1, warm_server())
        self.data = write_tasks(folder / "data")
        self.model = self._warm.submit(write_model, folder / "model").result()
        (folder / "fake").mkdir()
        fake = {"dir": str(folder / "fake"), "logprob": -math.log(VOCABULARY)}
        self.environ = {"FAKE_VLLM": json.dumps(fake)}

    def run(self, log_path: Path, *words: str, nodes: int = 1, reads: Path | None = None) -> Ended:
        """Start all nodes of a run, node 0 with these words, and wait for their ends. `reads`: where to note the settings read."""
        commands = [("run", *self.words(rank, nodes, words)) for rank in range(nodes)]
        noted = {setting_reads.NOTES: str(reads)} if reads else {}
        return self._ended(log_path, commands, {**self.environ, **noted})

    def type(self, log_path: Path, *words: str) -> Ended:
        """Run another command of fsbarrier on a run."""
        return self._ended(log_path, [words], {})

    def _ended(self, log_path: Path, commands: Sequence[Sequence[str]], environ: Mapping[str, str]) -> Ended:
        environ = {**environ, "FSBARRIER_LOG_PATH": str(log_path)}
        codes, said = self._warm.submit(run_in_forks, commands, environ).result()
        return Ended(codes, said, log_path)

    def close(self) -> None:
        self._warm.shutdown()

    def words(self, rank: int, nodes: int, words: Sequence[str]) -> tuple[str, ...]:
        if rank:
            return ("--worker", str(rank))
        several = ("--master", "--num-nodes", str(nodes)) if nodes > 1 else ()
        says_where = any(word.startswith(("model=", "init_from=", "data_path=")) for word in words)
        given = () if says_where else ("--model", str(self.model), "--data-path", str(self.data))
        return (*several, *given, *SMALL, *words)


def run_in_forks(commands: Sequence[Sequence[str]], environ: Mapping[str, str]) -> tuple[list[int], str]:
    """Run commands of fsbarrier at once, each in a fork of this process: their exit codes, and what they say."""
    if setting_reads.NOTES in environ:
        setting_reads.note_reads()
    with tempfile.TemporaryFile("w+") as out:
        pids = [in_a_fork(lambda words=words: command(*words), out.fileno(), environ) for words in commands]
        codes = [wait_for(pid, CASE_S) for pid in pids]
        out.seek(0)
        return codes, out.read()


class Ended:
    """How a start of all nodes ended."""

    def __init__(self, codes: list[int], said: str, log_path: Path) -> None:
        self.codes, self.said, self.log_path = codes, said, log_path

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(one.fields) for one in read_events(self.log_path) if one.fields["event"] == name]

    def check(self) -> Ended:
        assert set(self.codes) == {0}, self.described()
        return self

    def described(self) -> str:
        return f"{self.codes}\n{self.said}\n{logs_of_run(self.log_path)}"


def logs_of_run(log_path: Path) -> str:
    """The last lines of all logs."""
    found = sorted((log_path / "logs").rglob("*.log"))
    return "\n".join(f"--- {path}\n" + "\n".join(logs.last_lines(path, 15)) for path in found)
