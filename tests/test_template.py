"""Programs forked from a template: each is as one that is started anew, and nothing of it or of the template is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tree import ALL, DEADLINE_S, ROOT, TREE, Fifo, Watched, guards_of

from fsbarrier.supervision import processes
from fsbarrier.supervision.supervisor import Child, with_this_package
from fsbarrier.supervision.template import ForkedGuard, Template, serve

# Says what it finds around it, and leaves something in a library that a later program must not see.
SURROUNDINGS = """
import json, os, sys, signal, library
say = {
    "argv": sys.argv[1:], "main": __name__, "spec": __spec__.name, "env": dict(os.environ), "cwd": os.getcwd(),
    "fds": sorted(int(n) for n in os.listdir("/proc/self/fd")), "stdin": os.readlink("/proc/self/fd/0"),
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(), "imported_in": library.PID, "mine": os.getpid(),
    "earlier": list(library.programs), "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "sigpipe": str(signal.getsignal(signal.SIGPIPE)), "term": str(signal.getsignal(signal.SIGTERM)), "drawn": library.draw(),
    "real_main": sys.modules["__main__"].__spec__.name,
}
if __name__ == "__main__":
    library.programs.append(os.getpid())
    import atexit
    atexit.register(print, "and at its end")
    print(json.dumps(say))
"""
LIBRARY = (
    "import os, fsbarrier, numpy\nPID, programs = os.getpid(), []\ndef draw(): return numpy.random.rand()\n"
)
ENDS = "import os, signal, sys\nif __name__ == '__main__':\n    exec(sys.argv[1])\n"
THREADS = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"

Start = Callable[..., Child]


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Template]:
    texts = {
        "surroundings": SURROUNDINGS,
        "library": LIBRARY,
        "ends": ENDS,
        "threads": THREADS,
        "tree": TREE_MODULE,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # pytest changes it from one moment to the next.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    made = Template(("surroundings", "ends", "tree"), work_dir=tmp_path, log_file=tmp_path / "template.log")
    yield made
    made.stop()


TREE_MODULE = "if __name__ == '__main__':\n" + "\n".join("    " + line for line in TREE.splitlines())


@pytest.fixture
def start(template: Template, tmp_path: Path) -> Iterator[Start]:
    children: list[Child] = []

    def start(module: str, *args: str, **env: str) -> Child:
        argv = [sys.executable, "-P", "-m", module, *args]
        environ = with_this_package(os.environ) | env
        del environ["PYTEST_CURRENT_TEST"]
        child = Child.start(argv, env=environ, log_file=tmp_path / "log", name=module, template=template)
        children.append(child)
        return child

    yield start
    for child in children:
        child.stop(0.0)


def forked(child: Child) -> bool:
    return isinstance(child._guard, ForkedGuard)


def ready(template: Template) -> None:
    """Wait until it has imported everything."""
    template.load()
    assert template._listener is not None
    assert select.select([template._listener], [], [], DEADLINE_S)[0], "the template does not come up"


def said(child: Child) -> dict[str, Any]:
    assert child.wait(DEADLINE_S) == 0, child.last_log_lines()
    first, last = child.last_log_lines()
    assert last == "and at its end"
    found: dict[str, Any] = json.loads(first)
    return found


def test_a_forked_program_is_as_one_that_is_started_anew(template: Template, start: Start) -> None:
    alone = start("surroundings", "--spec", "a b")
    anew = said(alone)
    ready(template)
    first = start("surroundings", "--spec", "a b")
    here = said(first)
    second = start("surroundings", "--spec", "a b")
    there = said(second)
    assert not forked(alone) and forked(first) and forked(second)
    # Imported in the template, by one process for both; and neither sees what the other left.
    assert here["imported_in"] == there["imported_in"] not in (here["mine"], there["mine"])
    assert anew["imported_in"] == anew["mine"] == alone.pid
    assert here["drawn"] != there["drawn"]
    assert here["mine"] == first.pid and first.pids() == frozenset()
    for name in ("imported_in", "mine", "drawn"):
        for found in (anew, here, there):
            del found[name]
    assert anew == here == there
    assert here["leads"] and here["earlier"] == [] and here["main"] == "__main__"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('a reason')", 1),
        ("1 / 0", 1),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_exit_codes_and_messages_are_the_same(
    template: Template, start: Start, ending: str, code: int
) -> None:
    ready(template)
    child = start("ends", ending)
    assert forked(child) and child.wait(DEADLINE_S) == code
    lines = child.last_log_lines()
    assert lines == (["a reason"] if "reason" in ending else lines)
    assert ("ZeroDivisionError: division by zero" in lines) is (ending == "1 / 0")


def test_what_the_template_cannot_start_is_started_anew(template: Template, start: Start) -> None:
    ready(template)
    # A library may have read the variable when it was imported.
    for child in (start("ends", "pass", OMP_NUM_THREADS="7"), start("library")):
        assert not forked(child) and child.wait(DEADLINE_S) == 0


def test_modules_that_start_a_thread_are_not_forked(tmp_path: Path, start: Start) -> None:
    template = Template(("threads",), work_dir=tmp_path, log_file=tmp_path / "threads.log")
    template.load()
    assert template._child is not None and template._child.wait(DEADLINE_S) == 1
    assert "2 threads after the imports: cannot fork" in (tmp_path / "threads.log").read_text()
    child = Child.start(
        [sys.executable, "-P", "-m", "threads"],
        env=with_this_package(os.environ),
        log_file=tmp_path / "log",
        name="threads",
        template=template,
    )
    assert not forked(child) and child.wait(DEADLINE_S) == 0
    template.stop()


def test_stopping_a_forked_program_ends_all_below_and_nothing_else(
    template: Template, start: Start, fifo: Fifo, watched: Watched
) -> None:
    ready(template)
    child, other = start("tree", str(fifo.path), *ALL), start("tree", str(fifo.path), "plain")
    assert forked(child) and forked(other)
    fifo.pids(len(ALL) + 3)
    watched.add(*child.pids(), child.guard_pid)
    left = other.pids()
    child.stop(0.0)
    watched.wait_gone()
    fifo.assert_alive(sorted(left))
    # The template lives on.
    assert forked(start("ends", "pass"))


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_killed_guard_is_a_killed_program_and_the_template_lives_on(
    which: str, template: Template, start: Start, fifo: Fifo, watched: Watched
) -> None:
    ready(template)
    child = start("tree", str(fifo.path), *ALL)
    watched.add(*fifo.pids(len(ALL) + 1))
    outer, inner = guards_of(child.guard_pid)
    os.kill(outer if which == "outer" else inner, signal.SIGKILL)
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    watched.wait_gone()
    assert forked(start("ends", "pass"))


def test_a_killed_template_takes_its_programs_along_and_a_fresh_one_takes_its_place(
    template: Template, start: Start, fifo: Fifo, watched: Watched
) -> None:
    ready(template)
    child = start("tree", str(fifo.path), *ALL)
    assert forked(child) and template._child is not None
    watched.add(*fifo.pids(len(ALL) + 1))
    os.kill(template._child.pid, signal.SIGKILL)
    code = child.wait(DEADLINE_S)
    assert code is not None and code < 0
    watched.wait_gone()
    anew = start("ends", "pass")
    assert not forked(anew) and anew.wait(DEADLINE_S) == 0
    ready(template)
    assert forked(start("ends", "pass"))


# A daemon with a template and one program of it; it says the pids of all that it has started.
DAEMON = """
import os, select, sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fsbarrier.supervision import processes
from fsbarrier.supervision.supervisor import Child, with_this_package
from fsbarrier.supervision.template import ForkedGuard, Template
folder = Path(sys.argv[2])
template = Template(("tree",), work_dir=folder, log_file=folder / "template.log")
template.load()
select.select([template._listener], [], [])
argv = [sys.executable, "-P", "-m", "tree", *sys.argv[3:]]
child = Child.start(argv, env=with_this_package(os.environ), log_file=folder / "log", name="tree", template=template)
assert isinstance(child._guard, ForkedGuard)
sys.stdin.readline()
print(*processes.below(os.getpid()), flush=True)
sys.stdin.readline()
"""


def test_a_daemon_that_ends_without_reading_the_last_answer_is_no_error() -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        its.send(b"an answer")
        # Unread, it makes this a reset, and no orderly end.
        ours.close()
        serve(its)


@pytest.mark.usefixtures("template")
def test_a_killed_daemon_takes_the_template_and_its_programs_along(
    tmp_path: Path, fifo: Fifo, watched: Watched
) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(ROOT), str(tmp_path), str(fifo.path), *ALL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert daemon.stdin is not None and daemon.stdout is not None
        pids = fifo.pids(len(ALL) + 1)
        daemon.stdin.write("\n")
        daemon.stdin.flush()
        below = [int(pid) for pid in daemon.stdout.readline().split()]
        # Two guards of the template, the template, two guards of the program, and it with all it made.
        assert len(below) >= 5 + len(pids) and set(pids) < set(below)
        watched.add(*below)
        daemon.kill()
        watched.wait_gone()
    finally:
        daemon.kill()
        daemon.wait()
        for stream in (daemon.stdin, daemon.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
    assert processes.alive({pid: 0 for pid in below}) == {}


def test_the_benchmark_compares_both_kinds(checkout: Path) -> None:
    argv = [
        sys.executable,
        checkout / "scripts" / "bench_fork.py",
        "--repeats",
        "1",
        "--modules",
        "fsbarrier.workers.toy",
    ]
    said = subprocess.run(argv, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    name, forked_s, anew_s, _ratio = said.stdout.splitlines()[-1].split()
    assert name == "fsbarrier.workers.toy" and float(forked_s) > 0 and float(anew_s) > 0
