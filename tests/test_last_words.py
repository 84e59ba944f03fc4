"""Whoever fails says why in its own words: the line of a log that counts, and where users find it."""

from __future__ import annotations

import pytest

from fsbarrier.processes.last_words import cause, how_it_ended

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
    assert (
        cause(["loading", "/data/part: Permission denied", ""], speaks=True)
        == "/data/part: Permission denied"
    )
    assert cause(
        ["ValueError: handled", "Fatal Python error: Segmentation fault", "", "Thread 0x1"], killed=True
    ) == ("Fatal Python error: Segmentation fault")
    assert cause(["ValueError: handled", "step 3"], killed=True, speaks=True) == ""
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(-11) == "was ended by signal 11 (SIGSEGV)"
    assert "memory" in how_it_ended(-9) and how_it_ended(-99) == "was ended by signal 99"
