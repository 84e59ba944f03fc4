"""The documentation: its links lead somewhere, its code blocks run, and fsbarrier understands every command in it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from unittest import mock

import pytest
from commands import typed
from test_hygiene import ROOT, relative

from fsbarrier import cli
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import known_names
from fsbarrier.settings.sources import (
    FLAGS,
    ChosenValue,
    from_flags,
    from_words,
    setting_of,
    with_range_of_nodes,
)

#: What stands for "and whatever else you need".
ELLIPSES = {"...", "…"}
#: What looks like a setting: a log, a file, a method, and an entry of DeepSpeed's.
NO_SETTINGS = {
    "rollout.log",
    "update.log",
    "code.jsonl",
    "toy.py",
    "sft.py",
    "judge.ask",
    "optimizer.type",
    "train.jsonl",
    "train.parquet",
}
#: Ends a command inside a line.
OPERATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "(", ")"}


def documents() -> list[Path]:
    """The Markdown files of the project."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "phases").glob("*.md")),
    ]


def running_text(text: str) -> str:
    """A document without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The headings of a document as link targets."""
    headings = re.findall(r"^#+ +(.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", running_text(path.read_text())):
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", name):
            continue
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{relative(path)} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{relative(path)} links to {target}"


def test_each_decision_has_a_number_of_its_own() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(folder.glob("[0-9]*.md"))
    numbers = [page.name[:4] for page in pages]
    # Records of decisions that no longer hold are removed, and their numbers are not used again.
    assert len(set(numbers)) == len(numbers)
    for page in pages:
        assert page.read_text().startswith(f"# {page.name[:4]} "), (
            f"{relative(page)} calls itself something else"
        )
        title = page.read_text().splitlines()[0][7:]
        line = f"- [{page.name[:4]}]({page.name}) {title}\n"
        assert line in (folder / "README.md").read_text(), f"docs/decisions/README.md lacks {line}"


def runnable() -> Iterator[tuple[str, str]]:
    """The code blocks that stand under a line `<!-- tested -->`: they must run as they are, from the clone."""
    for path in documents():
        blocks = re.findall(
            r"^<!-- tested -->\n```bash\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
        )
        yield from ((f"{relative(path)}-{number}", block) for number, block in enumerate(blocks))


@pytest.mark.parametrize(("name", "block"), list(runnable()) or [pytest.param("", "true", id="none")])
def test_code_blocks_run(name: str, block: str, tmp_path: Path) -> None:
    """In a shell that has nothing but PATH and HOME, and the usual variable that keeps temporary files where the test removes them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, words in (("fsbarrier", "-P -m fsbarrier"), ("python", "")):
        script = f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" {words} "$@"\n'
        (tools / tool).write_text(script)
        (tools / tool).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
    )
    assert result.returncode == 0, f"{name}\n{result.stdout}\n{result.stderr}"


# --- every command ----------------------------------------------------------------------------------------------------------


def test_every_command_is_understood() -> None:
    commands = [(path, command) for path in documents() for command in commands_in(path.read_text())]
    assert len(commands) > 30
    wrong = [
        f"{relative(path)}: {shlex.join(words)}: {why}" for path, words in commands if (why := fault(words))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_flag_in_running_text_exists() -> None:
    mentions = [(path, mention) for path in documents() for mention in mentions_in(path.read_text())]
    assert len(mentions) > 40
    wrong = [f"{relative(path)}: {shlex.join(words)}" for path, words in mentions if unknown_flags(words)]
    assert not wrong, "\n".join(wrong)


def test_every_setting_in_running_text_exists() -> None:
    known = set(known_names())
    # The names of engines are the user's.
    sections = "|".join({name.partition(".")[0] for name in known if "." in name} - {"custom", "engines"})
    mentions = [
        (path, name)
        for path in documents()
        for span in re.findall(r"`([^`\n]+)`", _without_the_others_words(path))
        for name in re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z_]+)(?=$|[=\s,])", span)
    ]
    assert len(mentions) > 200
    wrong = [f"{relative(path)}: {name}" for path, name in mentions if name not in known | NO_SETTINGS]
    assert not wrong, "\n".join(wrong)


def _without_the_others_words(path: Path) -> str:
    """Running text; of the page about other programs without what is typed there."""
    prose = running_text(path.read_text())
    return re.sub(r"^\|[^|]*\|", "", prose, flags=re.MULTILINE) if path.name == "coming_from.md" else prose


def commands_in(text: str) -> Iterator[list[str]]:
    """The arguments of each `fsbarrier` (or ./run.sh, which is `fsbarrier run`) in the code blocks."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if ("fsbarrier " in line or "/run.sh " in line) and "`" not in line:
                yield from _commands_of_line(line)


def mentions_in(text: str) -> Iterator[list[str]]:
    """The same of running text, where a command need not be whole."""
    for span in re.findall(r"`((?:fsbarrier|\./run\.sh) [^`\n]+)`", running_text(text)):
        yield from _commands_of_line(span)


def _commands_of_line(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.wordchars += "$@%+^!…,[]{}:"
    try:
        words = list(lexer)
    except ValueError:
        # Not a shell's line, such as output with an apostrophe.
        return
    command: list[str] | None = None
    for word in [*words, ";"]:
        if word in OPERATORS:
            if command and re.fullmatch("[a-z]+", command[0]):
                yield command
            command = None
        elif command is not None:
            command.append(word)
        elif word.endswith("/run.sh"):
            command = ["run"]
        elif word == "fsbarrier" or word.endswith("bin/fsbarrier"):
            command = []


def fault(command: Sequence[str]) -> str:
    """Why fsbarrier would refuse these words before it looks at any file; "" if it would not."""
    name, *words = [word for word in command if word not in ELLIPSES]
    if {"--help", "-h"} & set(words):
        return "" if name in cli.COMMANDS else "no such command"
    with mock.patch.object(cli.load_command(name), "main", _check_settings):
        return typed(name, *words, code=None).err


def _check_settings(args: argparse.Namespace) -> int:
    """In the place of a command, after its line was parsed. A file of settings would have to be there."""
    known, chosen = known_names(), list[ChosenValue]()
    # `plan` takes settings, and not the flags of a run.
    if hasattr(args, "data_path"):
        chosen += from_flags({flag: getattr(args, setting_of(flag)) for flag in FLAGS}, known)
    if hasattr(args, "settings"):
        chosen += from_words(args.settings, known)
    resolve(with_range_of_nodes(chosen), cross_checks=False)
    return 0


def unknown_flags(mention: Sequence[str]) -> list[str]:
    """The words that are no command, and no flag of it."""
    name, *words = mention
    if name not in cli.COMMANDS:
        return [name]
    parser = argparse.ArgumentParser(prog=name)
    cli.load_command(name).add_arguments(parser)
    known = set(re.findall(r"--[\w-]+", parser.format_help()))
    # After two dashes come the words of another program (`guard`).
    own = takewhile(lambda word: word != "--", words)
    return [word for word in own if word.startswith("--") and word.partition("=")[0] not in known]
