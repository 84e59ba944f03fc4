"""Writes docs/settings.md from the settings' types: `python scripts/settings_doc.py` (`--check`: only say whether it is up to date)."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from generated_page import write_or_check  # noqa: E402

from fsbarrier.settings.section import EACH_SESSION, Changes, Section  # noqa: E402
from fsbarrier.settings.sections import EvalSet, EvalSettings, Settings, sections  # noqa: E402
from fsbarrier.settings.sources import FLAGS, SET_NAME  # noqa: E402
from fsbarrier.settings.value_types import Bounds  # noqa: E402

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
| empty | the setting cannot change: a start that names another value is refused with both values and the reason |

Change settings on node 0 only. The other nodes follow, and refuse to start if their own command line says otherwise
([how](protocol.md#settings-that-change)). A change holds until the next one, whether later starts repeat it or not.
"""


CHANGES = {
    Changes.NEVER: "",
    EACH_SESSION: "each session",
    Changes.EACH_START: "each start",
}


def page() -> str:
    """The whole document."""
    groups = sections()
    parts = [HEAD, table("The run", "", Settings, "", set(groups))]
    for name, section in groups.items():
        parts.append(table(f"`{name}`", (section.__doc__ or "").strip(), section, f"{name}.", set()))
        if section is EvalSettings:
            # Its table of sets has settings of its own.
            text = inspect.cleandoc(EvalSet.__doc__ or "")
            parts.append(table(f"`{SET_NAME}`", text, EvalSet, f"{SET_NAME}.", set()))
    return "\n".join(parts)


def table(title: str, text: str, section: type[Section], prefix: str, left_out: set[str]) -> str:
    """One section: a row a setting."""
    flags = {key: flag for flag, key in FLAGS.items()}
    hints = get_type_hints(section, include_extras=True)
    lines = [f"## {title}", "", *([text, ""] if text else [])]
    lines += ["| setting | value | default | changes | meaning |", "| --- | --- | --- | --- | --- |"]
    for item in fields(section):  # type: ignore[arg-type]
        if item.name in left_out:
            continue
        key = f"{prefix}{item.name}"
        named = f"`{key}`" + (f"<br>`{flags[key]}`" if key in flags else "")
        default: object = {} if item.default is MISSING else item.default
        when = CHANGES[item.metadata["changes"]]
        row = (named, shape(hints[item.name]), written(default), when, item.metadata["description"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def written(value: Any) -> str:
    """A default as one would type it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"`{','.join(str(item) for item in value)}`" if value else "empty"
    if isinstance(value, dict):
        return "empty"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def shape(hint: Any) -> str:
    """What may be given, in a few words: type and limits."""
    inner = get_args(hint)
    if NoneType in inner:
        return shape(inner[0]) + ", or none"
    if get_origin(hint) is Annotated:
        limits = [phrase for trait in inner[1:] if isinstance(trait, Bounds) for phrase in bounds(trait)]
        return " ".join([shape(inner[0]), *limits])
    if get_origin(hint) is Literal:
        return ", ".join(f"`{item}`" for item in inner)
    if get_origin(hint) is tuple:
        return "list of " + shape(inner[0]).replace("number", "numbers").replace("text", "words")
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", Mapping: "table"}
    return names[get_origin(hint) or hint]


def bounds(limit: Bounds) -> list[str]:
    """The limits of a number."""
    words = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}"}
    found = {name: getattr(limit, name) for name in words}
    return [words[name].format(f"{bound:g}") for name, bound in found.items() if bound is not None]


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), __doc__, "settings_doc.py"))
