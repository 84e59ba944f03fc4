"""Writes docs/settings.md from the settings' types: `python scripts/settings_doc.py` (`--check`: only say whether it is up to date)."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from generated_page import write_or_check  # noqa: E402

from fsbarrier.settings.section import EACH_SESSION, Changes, Section  # noqa: E402
from fsbarrier.settings.sections import NAMED, Settings, known_names, sections  # noqa: E402
from fsbarrier.settings.sources import FLAGS, TABLES, setting_of  # noqa: E402
from fsbarrier.settings.value_types import Kind, described  # noqa: E402

HEAD = """# Settings

<!-- Made by scripts/settings_doc.py from fsbarrier/settings/sections.py. Do not edit by hand. -->

Give a setting on the command line as `name=value`, or in a file with `--config`:

```bash
./run.sh --master --config mine.toml rollout.temperature=0.8 optimizer.betas=0.9,0.99
```

```toml
num_nodes = 3                 # mine.toml
[rollout]
temperature = 0.9
```

**Precedence.** Later sources override earlier ones: the defaults below, the file, flags, `name=value`. With neither `data_path` nor
`model`, the built-in task runs; its settings (`fsbarrier/data/demo_tasks.py`) override the defaults, and yours override both.

**Syntax.** Values are written as in TOML. A bare word is text, a list may omit its brackets, and `none` means "not set". Before
anything starts, unknown names, values of the wrong type or out of range, and contradictory settings are refused (exit code 2).

**Changing a setting later.** Node 0 writes the resolved settings into `run.json` when the run is created, and every later start of
every node reads them there. To change one, stop the run and start all nodes again, node 0 (`--master`) with the new value. The column
*changes* says when that is possible:

| changes | meaning |
| --- | --- |
| *each session* | when all nodes are started again; a start that names another value while others are at work is refused |
| *each start* | each start chooses the value anew |
| empty | the setting cannot change: a start that names another value is refused with both values |

Change settings on node 0 only. The other nodes follow, and refuse to start if their own command line says otherwise
([how](protocol.md#settings-that-change)). A change holds until the next one, whether later starts repeat it or not.
"""


CHANGES = {
    Changes.NEVER: "",
    EACH_SESSION: "each session",
    Changes.EACH_START: "each start",
}


# What somebody needs for a first run of their own.
FIRST = (
    *("model", "data_path", "reward.kind", "iterations", "eval_interval"),
    *("rollout.tasks", "rollout.samples", "rollout.max_tokens", "engine.max_model_len", "optimizer.lr"),
)


def page() -> str:
    """The whole document. What several sections have in common is described in the first one."""
    tables = {table for table in TABLES if table in known_names()}
    rows = {key: row(key, kind) for key, kind in known_names().items() if key not in tables}
    texts = {"": "", **{name: (section.__doc__ or "").strip() for name, section in sections().items()}}
    texts |= {name: inspect.cleandoc(section.__doc__ or "") for name, section in named().items()}
    parts = [HEAD, table("The ten to begin with", "", [rows[key] for key in FIRST])]
    for name in dict.fromkeys(key.rpartition(".")[0] for key in rows):
        keys = [key for key in rows if key.rpartition(".")[0] == name]
        own = [key for key in keys if not same_elsewhere(key)]
        rest = [f"`{key.rpartition('.')[2]}`" for key in keys if key not in own]
        text = f"{texts[name]}\n\nAs `{COMMON.get(name)}.*`: {', '.join(rest)}." if rest else texts[name]
        if own:
            parts.append(table(f"`{name}`" if name else "The run", text, [rows[key] for key in own]))
    return "\n".join(parts)


# Sections of names that the user chooses, and those that describe what both have.
COMMON = {"environments.NAME": "environment", "engines.NAME": "engine", "eval.sets.NAME": "eval"}


def same_elsewhere(key: str) -> bool:
    """Whether a setting is described in another section: `engines.NAME.dtype` as `engine.dtype`."""
    section, _, leaf = key.rpartition(".")
    return f"{COMMON.get(section)}.{leaf}" in DESCRIPTIONS


def table(title: str, text: str, rows: Sequence[str]) -> str:
    """One section: a row a setting."""
    head = ["| setting | value | default | changes | meaning |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([f"## {title}", "", *([text, ""] if text else []), *head, *rows]) + "\n"


def named() -> dict[str, type[Section]]:
    """The settings of tables whose names the user chooses, by the beginning of their names."""
    return {name.rstrip("."): section for own in NAMED.values() for name, section in own.items()}


def descriptions() -> Iterator[tuple[str, str]]:
    """Each setting's name, and the comment above its declaration."""
    owners: dict[str, type] = {"": Settings, **sections(), **named()}
    for owner, section in owners.items():
        text: list[str] = []
        inherited = (inspect.getsource(one) for one in section.__mro__ if issubclass(one, Section))
        for line in "\n".join(inherited).splitlines():
            if line.startswith("    #: "):
                text.append(line.removeprefix("    #: "))
            elif text:
                yield f"{owner}.{line.split(':')[0].strip()}".lstrip("."), " ".join(text)
                text = []


DESCRIPTIONS = dict(descriptions())


def row(key: str, kind: Kind) -> str:
    flag = next((f"<br>`{flag}`" for flag in FLAGS if setting_of(flag) == key), "")
    value = described(kind.hint).replace(" that is not empty", "").removeprefix("a ").removeprefix("one of ")
    cells = (f"`{key}`{flag}", value, written(kind.default), CHANGES[kind.changes], DESCRIPTIONS[key])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def written(value: Any) -> str:
    """A default as one would type it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"`{','.join(str(item) for item in value)}`" if value else "empty"
    if isinstance(value, dict):
        return "empty"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), __doc__, "settings_doc.py"))
