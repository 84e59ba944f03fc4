"""Complete runs of the default program in about a second: the real commands, daemon, rollouts, merges and updates of a tiny model.

Two things are not real. The server is fake_vllm.py. And no program starts a new Python: one process has imported what the programs
import, each daemon is a fork of it, and each program that a daemon starts is a fork of the daemon. It is not the process of the tests,
because PyTorch does not compute in a fork of a process in which it has computed gradients.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from fsbarrier import files
from fsbarrier.rundir import log_tail
from fsbarrier.rundir.journal import read_events
from fsbarrier.supervision import supervisor

FAKE_VLLM = Path(__file__).parent / "fake_vllm.py"
IMPORTED = (
    *("fsbarrier.workers.rollout", "fsbarrier.workers.prepare", "fsbarrier.workers.update"),
    *(
        "fsbarrier.aggregate",
        "fsbarrier.node.run_node",
        "fsbarrier.start.begin",
        "fsbarrier.cli",
        "http.server",
    ),
    *("transformers.models.qwen2.modeling_qwen2", "torch.distributed.checkpoint"),
)
VOCABULARY = 128  # the letters, which are their own token ids
CASE_S = 120.0
#: what makes each iteration small
SMALL = (
    *("rollout.tasks=2", "rollout.samples=2", "rollout.max_tokens=16", "eval.tasks=2"),
    *("engine.max_model_len=64", "trainer.minibatch=2", "trainer.epochs=1", "coordination.beat_s=0.1"),
)
_real_start, _real_run = supervisor.Child.start, subprocess.run


def warm_up() -> None:
    """Import what the programs import, once, and let every fork compute with one thread."""
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


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
        {"prompt": f"{'21' * (n + 1)}!mixed=", "answer": "1" * (n + 1) + "2" * (n + 1)} for n in range(count)
    ]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return folder


class Bench:
    """A model and tasks in a folder, and the runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warm = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), warm_up)
        self.model, self.data = write_model(folder / "model"), write_tasks(folder / "data")
        (folder / "fake").mkdir()
        fake = {"dir": str(folder / "fake"), "logprob": -math.log(VOCABULARY)}
        self.environ = {"FAKE_VLLM": json.dumps(fake)}

    def run(self, log_path: Path, *words: str, nodes: int = 1) -> Ended:
        """Start all nodes of a run, node 0 with these words, and wait for their ends."""
        commands = [("run", *self.words(rank, nodes, words)) for rank in range(nodes)]
        return self._ended(log_path, commands, self.environ)

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
        return f"{self.codes}\n{self.said}\n{logs(self.log_path)}"


def logs(log_path: Path) -> str:
    """The last lines of all logs."""
    found = sorted((log_path / "logs").rglob("*.log"))
    return "\n".join(f"--- {path}\n" + "\n".join(log_tail.last_lines(path, 15)) for path in found)


def command(*words: str) -> int:
    from fsbarrier import cli

    supervisor.Child.start = start_by_fork  # type: ignore[method-assign, assignment]
    subprocess.run = run_by_fork  # type: ignore[assignment]
    return cli.main(list(words))


# --- forks ----------------------------------------------------------------------------------------------------------------


def in_a_fork(do: Callable[[], int], out: int, environ: Mapping[str, str]) -> int:
    """Do something in a fork, in a process group of its own; returns its process id."""
    if pid := os.fork():
        return pid
    os.setsid()
    os.environ.update(environ)
    end_with(do, out)


def end_with(do: Callable[[], int], out: int) -> NoReturn:
    """In a fork: do it, with its output to `out`, and end with its exit code."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for given, fd in ((null, 0), (out, 1), (out, 2)):
            os.dup2(given, fd)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        code = do()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 255)


def wait_for(pid: int, deadline_s: float) -> int:
    """The exit code of a fork; all that it has started and left is ended too."""
    fd = os.pidfd_open(pid)
    ended = select.select([fd], [], [], deadline_s)[0]
    os.close(fd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else -999


class Fork:
    """What `Child.start` returns here: the same methods, for a program that is a fork of this process."""

    def __init__(self, pid: int, name: str, log_file: Path) -> None:
        self.pid = self.guard_pid = pid
        self.name, self.log_file = name, log_file
        self._fd, self._code, self._lock = os.pidfd_open(pid), None, threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

    def wait(self, timeout_s: float) -> int | None:
        if self.poll() is None:
            select.select([self._fd], [], [], timeout_s)
        return self.poll()

    def stop(self, grace_s: float = 5.0) -> int:
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 30.0)):
            if self.poll() is None:
                os.kill(self.pid, number)
                self.wait(patience_s)
        code = self.poll()
        assert code is not None
        return code

    def pids(self) -> frozenset[int]:
        return frozenset() if self._code is not None else frozenset({self.pid})

    def fileno(self) -> int:
        return self._fd if self._code is None else -1

    def last_log_lines(self, lines: int = log_tail.SHOWN_LINES) -> list[str]:
        return log_tail.last_lines(self.log_file, lines)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_by_fork(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log_file: Path,
    name: str,
    **rest: Any,
) -> Any:
    """`Child.start`. What is no program of ours is started as ever."""
    if "-m" not in argv or not argv[argv.index("-m") + 1].startswith("fsbarrier."):
        return _real_start(argv, env=env, log_file=log_file, name=name, cwd=rest.get("cwd"))
    files.make_dirs(log_file.parent)
    module, words = argv[argv.index("-m") + 1], argv[argv.index("-m") + 2 :]
    variables = dict(os.environ if env is None else env)
    log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if not (pid := os.fork()):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(variables)
            end_with(lambda: be_program(module, list(words)), log)
    finally:
        os.close(log)
    return Fork(pid, name, log_file)


def run_by_fork(argv: Sequence[str], **rest: Any) -> Any:
    """`subprocess.run` that captures the output. What is no program of ours is started as ever."""
    if "-m" not in argv or not argv[argv.index("-m") + 1].startswith("fsbarrier."):
        return _real_run(argv, **rest)
    with tempfile.TemporaryFile("w+") as out:
        module, words = argv[argv.index("-m") + 1], argv[argv.index("-m") + 2 :]
        code = wait_for(in_a_fork(lambda: be_program(module, list(words)), out.fileno(), {}), CASE_S)
        out.seek(0)
        return subprocess.CompletedProcess(argv, code, "", out.read())


def be_program(module: str, words: list[str]) -> int:
    """Do what `python -m module words` does."""
    match module:
        case "fsbarrier.workers.vllm_server":
            sys.argv = [str(FAKE_VLLM), *words]
            runpy.run_path(str(FAKE_VLLM), run_name="__main__")
        case "fsbarrier.workers.torchrun":
            return be_torchrun(words)
        case _:
            sys.argv = [module, *words]
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def be_torchrun(words: list[str]) -> int:
    """Do what torchrun does with one program that does not fail."""
    given = {
        name: words[words.index(f"--{name}") + 1]
        for name in ("nnodes", "node-rank", "nproc-per-node", "master-addr", "master-port")
    }
    each, first = int(given["nproc-per-node"]), int(given["node-rank"]) * int(given["nproc-per-node"])
    module, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    os.environ |= {
        "WORLD_SIZE": str(int(given["nnodes"]) * each),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": given["master-addr"],
        "MASTER_PORT": given["master-port"],
    }
    others = []
    for local in range(1, each):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            end_with(lambda: be_program(module, rest), 2)
        others.append(pid)
    os.environ |= {"RANK": str(first), "LOCAL_RANK": "0"}
    code = 0
    try:
        code = be_program(module, rest)
    finally:
        for pid in others:
            code = code or os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code
