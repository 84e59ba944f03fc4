"""Each program of a phase, and the engine, is made to crash: its own line stands in everything that a user looks at."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
from cluster import FAST, REPO, Cluster
from commands import typed
from engine_bench import write_model

TESTS = Path(__file__).parent
CRASHING = TESTS / "programs" / "crashing.py"
HEAD_DIM = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


def looked_up(log_path: Path, *words: str) -> str:
    """What a command says about the run, without its line breaks."""
    return " ".join(typed(*words, "--log-path", log_path, code=None).out.split())


def assert_said_everywhere(cluster: Cluster, line: str, log: str) -> None:
    """In the node's own output (the live view and the summary), in its log, `status`, `logs --first-error` and the report."""
    path = cluster.log_path
    (daemon_log,) = path.glob("logs/attempt_*/node_0/daemon.log")
    report = cluster.output / "report.html"
    typed("report", "--log-path", path, "--out", report)
    places = {
        "output": cluster.said(0),
        "daemon.log": daemon_log.read_text(),
        "status": looked_up(path, "status"),
        "status --json": looked_up(path, "status", "--json"),
        "first error": looked_up(path, "logs", "--first-error"),
        "report": report.read_text(),
    }
    for place, text in places.items():
        plain = " ".join(html.unescape(text).replace("\\", "").split())
        assert line in plain, f"{place} does not say {line!r}:\n{text}"
        # A narrow terminal breaks a long path anywhere.
        assert log in "".join(plain.split()), f"{place} does not name {log}:\n{text}"


# --- the engine ---

#: stands for vLLM: it dies of the first prompt, as vLLM does, with its real error above its farewell
VLLM = """
import runpy, sys
sys.argv[0] = {script!r}
def main():
    runpy.run_path({script!r}, run_name="__main__")
"""


def plant_vllm(folder: Path, **mode: object) -> dict[str, str]:
    """The environment of a node whose vLLM is fake_vllm.py."""
    package = folder / "planted" / "vllm" / "entrypoints" / "launchers" / "api_server"
    package.mkdir(parents=True)
    for level in (package, *package.parents[:3]):
        (level / "__init__.py").touch()
    (package / "entry.py").write_text(VLLM.format(script=str(TESTS / "fake_vllm.py")))
    (folder / "fake").mkdir()
    return {
        "PYTHONPATH": f"{TESTS.parent}:{folder / 'planted'}",
        "FAKE_VLLM": json.dumps({"dir": str(folder / "fake"), **mode}),
    }


def rollouts(folder: Path, *flags: str) -> Cluster:
    """A run that only rolls out, with a model of zeros."""
    data = folder / "data"
    data.mkdir()
    for name in ("train", "test"):
        (data / f"{name}.jsonl").write_text('{"prompt": "dcba=", "answer": "abcd"}\n' * 4)
    model = write_model(folder / "model")
    tokens = {letter: number for number, letter in enumerate("abcdefgh=")}
    (model / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "a"}})
    )
    words = ("--model", str(model), "--data-path", str(data), "--iterations", "1", "--rl-phase", "rollout")
    cheap = ("--eval-interval", "0", "rollout.max_tokens=8", "rollout.tasks=4", "rollout.samples=2")
    return Cluster(folder, 1, *words, *cheap, *FAST[:4], *flags, program="rl")


@pytest.mark.parametrize(
    ("crash", "line"),
    [
        ("head_dim", f"vLLM ended with exit code 0: {HEAD_DIM}"),
        pytest.param("segfault", "vLLM was ended by signal 11 (SIGSEGV): Fatal Python error: Segmentation fault", marks=pytest.mark.slow),
        ("import", "vLLM ended with exit code 1: ImportError: libcudart.so.13: cannot open shared object file"),
        pytest.param("port", "vLLM ended with exit code 1: OSError: [Errno 98] Address already in use", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_work_is_said_with_its_own_words(tmp_path: Path, crash: str, line: str) -> None:
    """Nor is it tried nine times: two attempts."""
    with rollouts(tmp_path) as cluster:
        cluster.env[0] = plant_vllm(tmp_path, crash=crash)
        cluster.start()
        assert cluster.wait() == {0: 4}, cluster.said(0)
        assert_said_everywhere(cluster, line, "logs/attempt_1/node_0/vllm.log")
        (log,) = cluster.log_path.glob("logs/attempt_1/node_0/vllm.log")
        starts = log.read_text().count("start vllm:")
        # A server that dies of the first prompt may do so before it was seen to be ready: then that attempt has other words.
        assert starts in ((2, 3) if crash in ("head_dim", "segfault") else (2,))


# --- the programs of the phases ---

CRASHES = {
    "import": "import fsbarrier_no_such_kernel",
    "memory": "raise MemoryError('cannot allocate 8 GiB')",
    "port": "import socket; a = socket.create_server(('127.0.0.1', 0)); socket.create_server(a.getsockname())",
    "segfault": "import faulthandler, os; faulthandler.enable(); os.kill(os.getpid(), 11)",
    "killed": "import os; print('step 3', flush=True); os.kill(os.getpid(), 9)",
    "rank": "import os, sys, time; int(os.environ['RANK']) == 1 and sys.exit(print('[rank1]: Traceback (most recent call last):\\n"
    '[rank1]:   File "x"\\n[rank1]: KeyError: the loss\', file=sys.stderr) or 1); time.sleep(60)',
}


@pytest.mark.parametrize(
    ("row", "crash", "line"),
    [
        (2, "import", "ended with exit code 1: ModuleNotFoundError: No module named 'fsbarrier_no_such_kernel'"),
        (4, "memory", "ended with exit code 1: MemoryError: cannot allocate 8 GiB"),
        (6, "import", "ended with exit code 1: ModuleNotFoundError: No module named 'fsbarrier_no_such_kernel'"),
        (8, "port", "ended with exit code 1: OSError: [Errno 98] Address already in use"),
        pytest.param(10, "rank", "ended with exit code 1: [rank1]: KeyError: the loss", marks=pytest.mark.torch),
        (11, "segfault", "was ended by signal 11 (SIGSEGV): Fatal Python error: Segmentation fault"),
        (12, "killed", "was ended by signal 9 (SIGKILL; the kernel sends it when memory runs out)"),
    ],
)  # fmt: skip
def test_a_program_that_crashes_is_said_with_its_own_words(
    tmp_path: Path, row: int, crash: str, line: str
) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASHES[crash])
    flags = (f"custom.row={row}", f"custom.script={script}", f"custom.processes={2 * (crash == 'rank')}")
    with Cluster(tmp_path, 1, *FAST, *flags, "--iterations", "1", program=str(CRASHING)) as cluster:
        if crash == "rank":
            cluster.env[0] = {"PYTHONPATH": str(REPO)}
        cluster.start()
        assert cluster.wait() == {0: 4}, cluster.said(0)
        assert_said_everywhere(cluster, line.replace("[rank1]: ", ""), "logs/attempt_1/node_0/crash.log")
        failed = [event for event in cluster.events() if event["event"] == "work_failed"]
        assert [event["phase"] for event in failed] == [row] * 2
