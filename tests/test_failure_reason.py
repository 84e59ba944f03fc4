"""A program that failed is said with its own words: which line of its log, where it is shown, and logs --first-error."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import FAST, REPO, Cluster
from commands import typed
from engine_bench import write_model
from fake_run import FakeRun, long_run

from fsbarrier.processes.failure_reason import cause, how_it_ended

HEAD = "(EngineCore pid=6395) ERROR 11-21 03:26:59 [core.py:10] "
SERVER = "(APIServer pid=6390) ERROR 11-21 03:27:00 [async_llm.py:906] "
TRACEBACK = "Traceback (most recent call last):"
HEAD_DIM = "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
VLLM = [
    "WARNING 11-21 03:26:50 [utils.py:255] This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
    f"{HEAD}{TRACEBACK}",
    f'{HEAD}  File "cpu_attn.py", line 3, in forward',
    f"{HEAD}{HEAD_DIM}",
    f"{SERVER}{TRACEBACK}",
    f"{SERVER}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
    "INFO:     Shutting down",
    "(APIServer pid=6390) INFO 11-21 03:27:01 [core_client.py:777] [shutdown] MPClient: complete",
]


def torchrun(traceback: str, rank: int = 1, *before: str) -> list[str]:
    """What two processes and their torchrun write when process `rank` fails first."""
    return [
        *before,
        TRACEBACK,
        '  File "run.py", line 8, in main',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "============================================================",
        "fsbarrier.workers.update FAILED",
        "------------------------------------------------------------",
        "Failures:",
        "[1]:",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : -15 (pid: 7)",
        "  traceback : Signal 15 (SIGTERM) received by PID 7",
        "------------------------------------------------------------",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-21_03:27:00",
        f"  rank      : {rank} (local_rank: {rank})",
        "  exitcode  : 1 (pid: 8)",
        "  error_file: <N/A>",
        f"  traceback : {traceback}",
        "============================================================",
    ]


NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (VLLM, HEAD_DIM),
        ([*VLLM[:3], f"{HEAD}ValueError: the model is odd", *VLLM[4:]], "ValueError: the model is odd"),
        (["RuntimeError: Engine core initialization failed."], "RuntimeError: Engine core initialization failed."),
        ([TRACEBACK, '  File "x.py", line 1', "Exception", ""], "Exception"),
        ([TRACEBACK, '  File "x.py", line 1', "mine.Boom: no class of ours", "INFO bye"], "mine.Boom: no class of ours"),
        (
            torchrun(NO_TRACEBACK, 1, f"[rank1]: {TRACEBACK}", '[rank1]:   File "a"', "[rank1]: KeyError: 'loss'",
                     f"[rank0]: {TRACEBACK}", '[rank0]:   File "b"', "[rank0]: RuntimeError: Connection closed by peer"),
            "KeyError: 'loss'",
        ),
        (torchrun("out of memory: 3 GiB", 0, "something"), "out of memory: 3 GiB"),
        (torchrun("Signal 11 (SIGSEGV) received by PID 8", 1, "ValueError: handled"), "Signal 11 (SIGSEGV) received by PID 8"),
        (
            torchrun("Signal 6 (SIGABRT) received by PID 8", 1, "terminate called after throwing an instance of 'c10::Error'",
                     "  what():  CUDA error: no kernel image is available"),
            "what():  CUDA error: no kernel image is available",
        ),
        (["usage: vllm serve [--a A]", "              [--b B]", "vllm_server.py: error: unrecognized arguments: --c"],
         "vllm_server.py: error: unrecognized arguments: --c"),
        (["ValueError: tried again without it", "RuntimeError: given up"], "RuntimeError: given up"),
        (["rollout.samples=3: not a multiple"], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_the_line_of_a_log_that_says_why(lines: list[str], said: str) -> None:
    assert cause(lines) == said


def test_what_a_program_of_ours_says_last_and_what_a_killed_one_says() -> None:
    handled = [TRACEBACK, '  File "mine.py", line 2', "KeyError: 'nosuch'"]
    assert cause([*handled, "error: the reward failed for 2 of 8"]) == "the reward failed for 2 of 8"
    assert cause(
        ["ValueError: handled", "Fatal Python error: Segmentation fault", "", "Thread 0x1"], killed=True
    ) == ("Fatal Python error: Segmentation fault")
    assert cause(["ValueError: handled", "step 3"], killed=True) == ""
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(-11) == "was ended by signal 11 (SIGSEGV)"
    assert "memory" in how_it_ended(-9) and how_it_ended(-99) == "was ended by signal 99"


# --- logs -----------------------------------------------------------------------------------------------------------------------

TRACE = [
    "step 41",
    "Traceback (most recent call last):",
    '  File "x.py", line 3',
    "ValueError: \x1b[31mbad\x1b[0m",
    "later",
]


def shown(run: FakeRun) -> str:
    return typed("logs", "--log-path", run.log_path, "--first-error").out


def test_a_failed_program_is_shown_with_its_log_and_its_neighbours(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.start()
    run.iteration(1)
    run.now += 60
    log = run.log_path / "logs" / "attempt_1" / "node_1" / "update.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    header = "--- 2026-01-01T00:00:00+00:00 start update: torchrun"
    log.write_text("\n".join([header, "RuntimeError: of an earlier start", header, *TRACE, ""]))
    run.fail(1, 2, 10, "torchrun ended with exit code 1", [f"(from {log})", "later"])
    run.lose(2, 2, 10, after=5.0, resume=1)
    out = shown(run)
    assert "torchrun ended with exit code 1" in out.split("events around it")[0]
    assert f"the error in {log}:" in out
    assert "step 41" in out and "ValueError" in out and "earlier start" not in out
    assert "\x1b" not in out and "iteration 1" not in out.split("events around it")[1], "a minute before"
    said = typed("logs", "--log-path", run.log_path, "--file", "update", "--attempt", "1", "--lines", "1")
    assert said.out.strip().endswith("later")
    assert "node 2" in out.split("events around it")[1], "what happened next stands there, too"


def test_a_lost_node_counts_and_a_good_run_has_none(tmp_path: Path) -> None:
    assert "node 2" in shown(long_run(tmp_path / "lost", 4))
    good = long_run(tmp_path / "good", 2, lose_at=None)
    assert shown(good) == "no node, program or phase of this run has failed\n"


@pytest.fixture
def logged(tmp_path: Path) -> FakeRun:
    """Node 1 was started twice."""
    run = FakeRun(tmp_path / "run", nodes=2)
    for rank in (0, 1, 1):
        run.join(rank)
        folder = run.paths.node_logs(run.incarnations[rank], rank)
        for name in ("daemon", "vllm"):
            lines = [f"{name} {rank} {run.incarnations[rank]} line {n}" for n in (1, 2, 3)]
            (folder / f"{name}.log").write_text("\n".join(lines) + "\n")
    return run


@pytest.mark.parametrize(
    ("flags", "starts"),
    [
        ((), ["daemon 0 1", "vllm 0 1", "daemon 1 2", "vllm 1 2"]),
        (("--node", "1"), ["daemon 1 2", "vllm 1 2"]),
        (("--file", "vllm", "--attempt", "1"), ["vllm 0 1", "vllm 1 1"]),
        (("--node", "0", "--file", "daemon.log"), ["daemon 0 1"]),
    ],
)
def test_logs_shows_the_last_lines_of_each_nodes_latest_start(
    logged: FakeRun, flags: tuple[str, ...], starts: list[str]
) -> None:
    said = typed("logs", "--log-path", logged.log_path, "-n", "2", *flags)
    labels = [f"[node {start.split()[1]} {start.split()[0]}]" for start in starts]
    expected = [
        f"{label} {start} line {n}" for label, start in zip(labels, starts, strict=True) for n in (2, 3)
    ]
    assert said.out.splitlines() == expected


def test_new_lines_are_followed(logged: FakeRun) -> None:
    argv = [
        sys.executable,
        "-m",
        "fsbarrier",
        "logs",
        "--log-path",
        str(logged.log_path),
        "--node",
        "0",
        "-f",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[-1] for _ in range(6)] == ["1", "2", "3"] * 2
        for word in ("new", "newer"):
            with (logged.paths.node_logs(1, 0) / "vllm.log").open("a") as log:
                log.write(f"{word}\n")
            assert process.stdout.readline() == f"[node 0 vllm] {word}\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "" and process.wait() == 130


# --- in every place where it is shown -------------------------------------------------------------------------------------------

TESTS = Path(__file__).parent
CRASHING = TESTS / "programs" / "crashing.py"
NO_KERNEL = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


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
BROKEN_VLLM = """
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
    (package / "entry.py").write_text(BROKEN_VLLM.format(script=str(TESTS / "fake_vllm.py")))
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
        ("head_dim", f"vLLM ended with exit code 0: {NO_KERNEL}"),
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
